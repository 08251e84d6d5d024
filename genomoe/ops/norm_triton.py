"""RMSNorm with the residual addition, one pass over [T, D] forward and one backward.

Axis legend: T tokens, D hidden size, R rows a program holds at a time, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_forward_kernel(
    x_ptr, delta_ptr, weight_ptr, stream_ptr, y_ptr, rstd_ptr, T, D, eps,
    HAS_DELTA: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, BLOCK_D)
    at = row[:, None] * D + column[None, :]
    inside = (row < T)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        # rounded to the stream's dtype before it is normed, as two separate operations would
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(stream_ptr + at, x, mask=inside)
    x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * weight[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < T)


@triton.jit
def norm_backward_kernel(
    stream_ptr, weight_ptr, rstd_ptr, dy_ptr, dstream_ptr, dx_ptr, dweight_ptr, T, D, blocks_per_program,
    HAS_DSTREAM: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_D)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK_D], dtype=tl.float32)
    for block in range(0, blocks_per_program):
        row = (program.to(tl.int64) * blocks_per_program + block) * R + tl.arange(0, R)
        at = row[:, None] * D + column[None, :]
        inside = (row < T)[:, None] & (column < D)[None, :]
        x = tl.load(stream_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < T, other=0.0)
        xhat = x * rstd[:, None]
        dweight += tl.sum(dy * xhat, axis=0)
        g = dy * weight[None, :]
        dx = (g - xhat * (tl.sum(g * xhat, axis=1) / D)[:, None]) * rstd[:, None]
        if HAS_DSTREAM:
            dx += tl.load(dstream_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dweight_ptr + program.to(tl.int64) * D + column, dweight, mask=column < D)


def tile(D: int) -> tuple[int, int, int]:
    """(BLOCK_D, rows per program, warps): 4,096 values a program, 16 to 32 a thread."""
    block = max(triton.next_power_of_2(D), 16)
    rows = max(1, min(16, 4096 // block))
    return block, rows, 4 if rows * block <= 4096 else 8


def norm_forward(x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(stream, normed, 1/rms [T] float32); the stream is `x_TD` itself without a delta."""
    T, D = x_TD.shape
    stream_TD = x_TD if delta_TD is None else torch.empty_like(x_TD)
    y_TD = torch.empty_like(x_TD)
    rstd_T = torch.empty(T, dtype=torch.float32, device=x_TD.device)
    block, rows, warps = tile(D)
    if T:
        norm_forward_kernel[(triton.cdiv(T, rows),)](
            x_TD, x_TD if delta_TD is None else delta_TD, weight_D, stream_TD, y_TD, rstd_T, T, D, eps,
            HAS_DELTA=delta_TD is not None, R=rows, BLOCK_D=block, num_warps=warps,
        )  # fmt: skip
    return stream_TD, y_TD, rstd_T


def norm_backward(
    stream_TD: Tensor, weight_D: Tensor, rstd_T: Tensor, dy_TD: Tensor, dstream_TD: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of the stream, gradient of the weight); the weight's is summed in float32 in a fixed order."""
    T, D = stream_TD.shape
    dx_TD = torch.empty_like(stream_TD)
    block, rows, warps = tile(D)
    blocks = triton.cdiv(T, rows)
    programs = max(1, min(blocks, 4 * _processors(stream_TD)))
    dweight_PD = torch.empty(programs, D, dtype=torch.float32, device=stream_TD.device)
    norm_backward_kernel[(programs,)](
        stream_TD, weight_D, rstd_T, dy_TD, dx_TD if dstream_TD is None else dstream_TD, dx_TD, dweight_PD, T, D,
        triton.cdiv(blocks, programs),
        HAS_DSTREAM=dstream_TD is not None, R=rows, BLOCK_D=block, num_warps=warps,
    )  # fmt: skip
    return dx_TD, dweight_PD.sum(0).to(weight_D.dtype)


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2


class AddRMSNorm(torch.autograd.Function):
    """(x, delta or None, weight, eps) -> (x + delta, its RMSNorm); keeps the stream and 1/rms."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_TD = x_TD.contiguous()
        if delta_TD is not None:
            delta_TD = delta_TD.contiguous()
        stream_TD, y_TD, rstd_T = norm_forward(x_TD, delta_TD, weight_D, eps)
        ctx.save_for_backward(stream_TD, weight_D, rstd_T)
        ctx.mark_non_differentiable(rstd_T)
        ctx.set_materialize_grads(False)
        ctx.has_delta = delta_TD is not None
        return stream_TD, y_TD, rstd_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dstream_TD, dy_TD = grads[0], grads[1]
        if dy_TD is None:
            return dstream_TD, dstream_TD if ctx.has_delta else None, None, None
        stream_TD, weight_D, rstd_T = ctx.saved_tensors
        if dstream_TD is not None:
            dstream_TD = dstream_TD.contiguous()
        dx_TD, dweight_D = norm_backward(stream_TD, weight_D, rstd_T, dy_TD.contiguous(), dstream_TD)
        return dx_TD, dx_TD if ctx.has_delta else None, dweight_D, None
