"""Which implementation the pointwise operations (norm, RoPE, routing) use: fused Triton kernels or plain PyTorch."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


@functools.cache
def triton_missing() -> str | None:
    """Why Triton's kernels cannot be used at all, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def use_triton(x: Tensor, backend: str) -> bool:
    """Whether to run the fused kernel on this tensor.

    Args:
        backend: "auto" (Triton for CUDA tensors where it is installed), "torch", or "triton" (also on the CPU, in
            Triton's interpreter, for tests).

    Raises:
        ValueError: an unknown backend, or "triton" without it.
    """
    if backend == "auto":
        return x.is_cuda and triton_missing() is None
    if backend == "triton":
        missing = triton_missing()
        if missing:
            raise ValueError(f"kernels.pointwise=triton cannot be used: {missing}")
        return True
    if backend != "torch":
        raise ValueError(f"there is no pointwise backend {backend!r}; backends: auto, torch, triton")
    return False
