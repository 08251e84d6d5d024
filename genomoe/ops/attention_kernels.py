"""Attention kernels called forward and backward by hand, for what autograd's own call cannot do.

* Tensors too large for one launch: the joint query/key/value buffer of a million tokens spans 2^32 bytes, past what
  kernels with 32-bit offsets reach, and their workspaces grow with the heads of a launch. A launch then sees copies of
  one group of heads, and the outputs and gradients are written into their places.
* Outputs kept while the layer around them is run again (`AttentionCache`): attention, whose cost grows with the square
  of the context, runs once.

Axis legend: B batch, S sequence, T tokens (packed), H query heads, G key/value heads, C head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

REACH = 1 << 30
"""Most elements that the queries' rows may span for a launch on the tensors as they are: 2^31 bytes of bfloat16."""
LARGEST = 1 << 29
"""Most elements of the queries of one group of heads, past `REACH`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """What a query may attend to."""

    cu_seqlens: Tensor | None
    max_seqlen: int
    causal: bool
    window: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One attention kernel, forward and backward, on [B, S, heads, C] or packed [T, heads, C]."""

    forward: Callable[[Tensor, Tensor, Tensor, Masking], tuple[Tensor, tuple[Tensor, ...]]]
    """(q, k, v, masking) -> output, and what the backward pass needs besides."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(gradient, q, k, v, output, kept, masking) -> dq, dk, dv."""


def is_large(q: Tensor) -> bool:
    """Whether the queries span more memory than one launch should see."""
    tokens = q.shape[:-2].numel()
    return q.is_cuda and tokens * abs(q.stride(-3)) > REACH


class AttentionCache:
    """The output of one attention call and what its backward pass needs, from a layer's first run to its second."""

    def __init__(self) -> None:
        self.kept: list[Tensor] | None = None


def call_kernel(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking, kernel: Kernel, cache: AttentionCache | None = None
) -> Tensor:
    """The kernel's attention: one launch within `REACH`, else heads in as few groups as `LARGEST` allows.

    Args:
        cache: filled by the first call; the second takes the output from it and leaves it empty.
    """
    return _Called.apply(q, k, v, masking, kernel, cache)


def num_head_groups(query_elements: int, num_kv_heads: int) -> int:
    """Groups into which heads are divided past `REACH`: a divisor of the key/value heads."""
    wanted = -(-query_elements // LARGEST)
    return next((n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n >= wanted), num_kv_heads)


def head_groups(q: Tensor, num_kv_heads: int) -> list[tuple[slice, slice]]:
    """(query heads, key/value heads) of each launch."""
    groups = num_head_groups(q.numel(), num_kv_heads)
    h, g = q.shape[-2] // groups, num_kv_heads // groups
    return [(slice(i * h, (i + 1) * h), slice(i * g, (i + 1) * g)) for i in range(groups)]


class _Called(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, masking: Masking, kernel: Kernel, cache: AttentionCache | None
    ) -> Tensor:
        if cache is not None and cache.kept is not None:
            (out, *kept), cache.kept = cache.kept, None
        else:
            out, kept = _forward(q, k, v, masking, kernel)
            if cache is not None:
                cache.kept = [out, *kept]
        # a tensor of its own: the one in the cache must not come to hold this graph
        out = out.view_as(out)
        ctx.save_for_backward(q, k, v, out, *kept)
        ctx.masking, ctx.kernel = masking, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *kept = ctx.saved_tensors
        return *_backward(grads[0], q, k, v, out, kept, ctx.masking, ctx.kernel), None, None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, masking: Masking, kernel: Kernel) -> tuple[Tensor, list[Tensor]]:
    if not is_large(q):
        out, more = kernel.forward(q, k, v, masking)
        return out, list(more)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kept: list[Tensor] = []
    for heads, kv_heads in head_groups(q, k.shape[-2]):
        out[..., heads, :], more = kernel.forward(
            q[..., heads, :].contiguous(), k[..., kv_heads, :].contiguous(), v[..., kv_heads, :].contiguous(), masking
        )
        kept += more
    return out, kept


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: list[Tensor], masking: Masking, kernel: Kernel
) -> tuple[Tensor, Tensor, Tensor]:
    if not is_large(q):
        return kernel.backward(grad.contiguous(), q, k, v, out, tuple(kept), masking)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    groups = head_groups(q, k.shape[-2])
    each = len(kept) // len(groups)
    for i, (heads, kv_heads) in enumerate(groups):
        dq[..., heads, :], dk[..., kv_heads, :], dv[..., kv_heads, :] = kernel.backward(
            grad[..., heads, :].contiguous(),
            q[..., heads, :].contiguous(),
            k[..., kv_heads, :].contiguous(),
            v[..., kv_heads, :].contiguous(),
            out[..., heads, :].contiguous(),
            tuple(kept[i * each : (i + 1) * each]),
            masking,
        )
    return dq, dk, dv


# ---- kernels -------------------------------------------------------------------------------------------------


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, True, 0.0, masking.causal, False
    )
    return out.transpose(1, 2), (lse, seed, offset)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    lse, seed, offset = kept
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(x.transpose(1, 2) for x in (grad, q, k, v, out)), lse, seed, offset, None, None, None,
        q.shape[1], k.shape[1], 0.0, masking.causal,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, tuple[Tensor, ...]]:
    assert masking.cu_seqlens is not None
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, masking.cu_seqlens, masking.cu_seqlens, masking.max_seqlen, masking.max_seqlen, 0.0,
        masking.causal, False, window_size_left=_left(masking), window_size_right=_right(masking),
    )  # fmt: skip
    return out, (lse, rng, unused)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], masking: Masking
) -> tuple[Tensor, Tensor, Tensor]:
    lse, rng, unused = kept
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, masking.cu_seqlens, masking.cu_seqlens, masking.max_seqlen, masking.max_seqlen, 0.0,
        masking.causal, rng, unused, window_size_left=_left(masking), window_size_right=_right(masking),
    )  # fmt: skip


def _left(masking: Masking) -> int:
    return -1 if masking.window is None else masking.window - 1


def _right(masking: Masking) -> int:
    return 0 if masking.causal else -1


CUDNN = Kernel(forward=_cudnn_forward, backward=_cudnn_backward)
"""cuDNN behind PyTorch: fixed windows, no sliding window."""
FLASH = Kernel(forward=_flash_forward, backward=_flash_backward)
"""PyTorch's own flash kernel over packed sequences, called directly since its public wrapper has no window in 2.11."""


def kernel_of(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Kernel:
    """Any differentiable attention as a `Kernel`; its backward pass runs the forward pass again."""

    def forward(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, tuple[Tensor, ...]]:
        return function(q, k, v), ()

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: tuple[Tensor, ...], masking: Masking
    ) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            dq, dk, dv = torch.autograd.grad(function(*leaves), leaves, grad)
        return dq, dk, dv

    return Kernel(forward=forward, backward=backward)


def cudnn_can_run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Whether PyTorch would let cuDNN take these [B, S, heads, C] tensors."""
    if not q.is_cuda:
        return False
    gqa = q.shape[2] != k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, gqa)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)
