"""Triton kernels of the fused grouped MLP. Importing this package needs Triton; nothing else in GenoMoE imports it eagerly."""
