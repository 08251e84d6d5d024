"""Triton kernels of the fused grouped MLP. Importing it needs Triton, so it is imported lazily."""
