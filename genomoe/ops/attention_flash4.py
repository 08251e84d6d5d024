"""FlashAttention-4 (the flash-attn-4 package), optional and imported on first use.

On an H200, model TFLOP/s forward and backward, beside what runs without it (version 4.0.0b15; commit b2d3102, the
first row by calling both kernels alone):

| bfloat16, 16 query and 8 key/value heads | this | without | |
|---|---|---|---|
| heads of 64, a window of 131,072 | 507 | 434 | cuDNN |
| heads of 64, 4 windows of 8,192 | 493 | 429 | cuDNN |
| heads of 128, 4 windows of 8,192 | 603 | 542 | cuDNN |
| heads of 64, 16 packed sequences of 4,096 | 444 | 250 | torch's flash kernel |
| heads of 64, a sliding window of 8,192 over 262,144 | 459 | 257 | torch's flash kernel |

Its backward pass adds up dq in the order in which blocks finish; under `torch.use_deterministic_algorithms` in one
order, 5 % slower.

Axis legend: B batch, S sequence, T tokens (packed), H query heads, G key/value heads, C head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from genomoe.ops.attention_kernels import Kernel, Masking
from genomoe.ops.optional import package_unusable

LARGEST_HEAD = 128
"""Largest head size for which `auto` takes it."""
HEAD_STEP = 32
"""Its backward pass compiles for multiples of this (4.0.0b15)."""


@functools.cache
def flash4_missing() -> str | None:
    """Why FlashAttention-4 cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability()[0] < 9:
        return "it needs an NVIDIA GPU of compute capability 9.0 or higher"
    return package_unusable("flash-attn-4", "flash4", _kernels)


def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The package's forward and backward pass; its public functions have no backward pass to call by hand."""
    from flash_attn.cute import interface

    return interface._flash_attn_fwd, interface._flash_attn_bwd


def flash4_pays(dtype: torch.dtype, head_size: int) -> bool:
    """Whether `auto` should take it for such heads here: on Hopper, where it was measured."""
    return (
        flash4_missing() is None
        and torch.cuda.get_device_capability()[0] == 9
        and dtype in (torch.bfloat16, torch.float16)
        and head_unfit(head_size) is None
        and head_size <= LARGEST_HEAD
    )


def head_unfit(head_size: int) -> str | None:
    """Why it cannot run for heads of this size, or None."""
    if head_size % HEAD_STEP:
        return f"its backward pass takes head sizes that are multiples of {HEAD_STEP}, not {head_size}"
    return None


@torch.library.custom_op("genomoe::flash4_attention_forward", mutates_args=())
def flash4_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, max_seqlen: int, causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output, shaped as q, and log sum exp of the scores, [B, H, S], or [H, T] packed.

    Queries and keys of fixed windows may differ in number where nothing is masked.
    """
    forward, _ = _kernels()
    out, lse, *_ = forward(q, k, v, return_lse=True, **_layout(cu_seqlens, max_seqlen, causal, window))
    return out, lse


@flash4_forward.register_fake
def _(q, k, v, cu_seqlens, max_seqlen, causal, window):
    *batch, heads, _ = q.shape
    sums = (batch[0], heads, batch[1]) if cu_seqlens is None else (heads, batch[0])
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(sums, dtype=torch.float32)


def _layout(cu_seqlens: Tensor | None, max_seqlen: int, causal: bool, window: int | None) -> dict[str, Any]:
    """The package's names for what a query may attend to."""
    layout: dict[str, Any] = {"causal": causal}
    if window is not None:
        layout = {"causal": False, "window_size_left": window - 1, "window_size_right": 0}
    if cu_seqlens is not None:
        layout |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        layout |= {"max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return layout


def _forward(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, lse = flash4_forward(q, k, v, masking.cu_seqlens, masking.max_seqlen, masking.causal, masking.window)
    return out, (lse,)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    _, backward = _kernels()
    layout = _layout(masking.cu_seqlens, masking.max_seqlen, masking.causal, masking.window)
    deterministic = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv, *_ = backward(q, k, v, out, grad, kept[0], deterministic=deterministic, **layout)
    return dq, dk, dv


FLASH4 = Kernel(forward=_forward, backward=_backward)
"""FlashAttention-4 over fixed windows or packed sequences, with or without a sliding window."""
