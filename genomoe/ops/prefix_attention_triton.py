"""One pass that moves rows towards other rows, each by a weight of its own.

Axis legend: N rows, C columns, R rows a program holds.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def lerp_rows_kernel(a_ptr, b_ptr, weight_ptr, N, C, R: tl.constexpr, BLOCK_C: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, BLOCK_C)
    at = row[:, None] * C + column[None, :]
    inside = (row < N)[:, None] & (column < C)[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row, mask=row < N, other=0.0)
    tl.store(a_ptr + at, (a + (b - a) * weight[:, None]).to(a_ptr.dtype.element_ty), mask=inside)


def lerp_rows_(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """a + (b - a) weight in place of `a`: rows [..., C] of one dtype, weights [...] float32, all contiguous."""
    N, C = weight.numel(), a.shape[-1]
    block = triton.next_power_of_2(C)
    rows = max(1, 4096 // block)
    if N:
        lerp_rows_kernel[(triton.cdiv(N, rows),)](a, b, weight, N, C, R=rows, BLOCK_C=block, num_warps=4)
    return a
