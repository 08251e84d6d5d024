"""RoPE on the joint query/key/value projection, in place forward; one pass gathers the gradients backward.

Axis legend: T tokens, H query heads, G key/value heads, C head size, P = C/2 pairs, Q = (H + 2G) C columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_forward_kernel(
    qkv_ptr, cos_ptr, sin_ptr, position_ptr, T, seqlen,
    HG: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    HAS_POSITION: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    pair = tl.arange(0, BLOCK)
    inside = (row < T)[:, None] & (pair < HG * P)[None, :]
    if HAS_POSITION:
        position = tl.load(position_ptr + row, mask=row < T, other=0).to(tl.int64)
    else:
        position = row % seqlen
    angle = position[:, None] * P + (pair % P)[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    at = row[:, None] * Q + ((pair // P) * (2 * P) + pair % P)[None, :]
    first = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at + P, mask=inside, other=0.0).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    tl.store(qkv_ptr + at, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(qkv_ptr + at + P, (second * cos + first * sin).to(dtype), mask=inside)


@triton.jit
def rope_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, dqkv_ptr, cos_ptr, sin_ptr, position_ptr, T, seqlen,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, HAS_POSITION: tl.constexpr, R: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    Q: tl.constexpr = (H + 2 * G) * 2 * P
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    if HAS_POSITION:
        position = tl.load(position_ptr + row, mask=row < T, other=0).to(tl.int64)
    else:
        position = row % seqlen
    dtype = dqkv_ptr.dtype.element_ty

    pair = tl.arange(0, BLOCK_Q)
    inside = (row < T)[:, None] & (pair < H * P)[None, :]
    angle = position[:, None] * P + (pair % P)[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    column = ((pair // P) * (2 * P) + pair % P)[None, :]
    source = row[:, None] * (H * 2 * P) + column
    first = tl.load(dq_ptr + source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(dq_ptr + source + P, mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * Q + column
    tl.store(dqkv_ptr + at, (first * cos + second * sin).to(dtype), mask=inside)
    tl.store(dqkv_ptr + at + P, (second * cos - first * sin).to(dtype), mask=inside)

    pair = tl.arange(0, BLOCK_K)
    inside = (row < T)[:, None] & (pair < G * P)[None, :]
    angle = position[:, None] * P + (pair % P)[None, :]
    cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
    column = ((pair // P) * (2 * P) + pair % P)[None, :]
    source = row[:, None] * (G * 2 * P) + column
    first = tl.load(dk_ptr + source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(dk_ptr + source + P, mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * Q + H * 2 * P + column
    tl.store(dqkv_ptr + at, (first * cos + second * sin).to(dtype), mask=inside)
    tl.store(dqkv_ptr + at + P, (second * cos - first * sin).to(dtype), mask=inside)

    value = tl.arange(0, BLOCK_V)
    inside = (row < T)[:, None] & (value < G * 2 * P)[None, :]
    dv = tl.load(dv_ptr + row[:, None] * (G * 2 * P) + value[None, :], mask=inside, other=0.0)
    tl.store(dqkv_ptr + row[:, None] * Q + (H + G) * 2 * P + value[None, :], dv.to(dtype), mask=inside)


def rows_per_program(block: int) -> int:
    """Rows so that a program holds about 2,048 pairs."""
    return max(1, min(16, 2048 // block))


class RopeQKV(torch.autograd.Function):
    """(qkv, cos, sin, positions or None, H, G, seqlen) -> views (q, k, v) of `qkv`, whose memory it overwrites.

    Nothing upstream needs the projection's own output for its gradient, and nothing else may hold it; so q, k and v
    live in the one buffer, and the whole operation moves each byte once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_TQ: Tensor,
        cos_SP: Tensor,
        sin_SP: Tensor,
        position_T: Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        seqlen: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        T, Q = qkv_TQ.shape
        P = cos_SP.shape[1]
        heads = num_heads + num_kv_heads
        block = triton.next_power_of_2(heads * P)
        rows = rows_per_program(block)
        if T:
            rope_forward_kernel[(triton.cdiv(T, rows),)](
                qkv_TQ, cos_SP, sin_SP, cos_SP if position_T is None else position_T, T, seqlen,
                HG=heads, P=P, Q=Q, HAS_POSITION=position_T is not None, R=rows, BLOCK=block, num_warps=4,
            )  # fmt: skip
        ctx.table = (cos_SP, sin_SP, position_T)
        ctx.shape = (num_heads, num_kv_heads, seqlen)
        heads_THC = qkv_TQ.view(T, heads + num_kv_heads, 2 * P)
        q_THC, k_TGC, v_TGC = heads_THC.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return q_THC, k_TGC, v_TGC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (grad.contiguous() for grad in grads)
        cos_SP, sin_SP, position_T = ctx.table
        H, G, seqlen = ctx.shape
        T, P = dq.shape[0], cos_SP.shape[1]
        dqkv_TQ = torch.empty(T, (H + 2 * G) * 2 * P, dtype=dq.dtype, device=dq.device)
        block_q = triton.next_power_of_2(H * P)
        rows = rows_per_program(block_q)
        if T:
            rope_backward_kernel[(triton.cdiv(T, rows),)](
                dq, dk, dv, dqkv_TQ, cos_SP, sin_SP, cos_SP if position_T is None else position_T, T, seqlen,
                H=H, G=G, P=P, HAS_POSITION=position_T is not None, R=rows, BLOCK_Q=block_q,
                BLOCK_K=triton.next_power_of_2(G * P), BLOCK_V=triton.next_power_of_2(G * 2 * P), num_warps=4,
            )  # fmt: skip
        return dqkv_TQ, None, None, None, None, None, None
