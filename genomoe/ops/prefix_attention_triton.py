"""One pass that moves rows towards other rows, each by a weight of its own."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def lerp_rows_kernel(a_ptr, b_ptr, weight_ptr, total, C, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at // C, mask=inside, other=0.0)
    tl.store(a_ptr + at, (a + (b - a) * weight).to(a_ptr.dtype.element_ty), mask=inside)


def lerp_rows_(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """a + (b - a) weight in place of `a`: rows [..., C] of one dtype, weights [...] float32, all contiguous."""
    if a.numel():
        grid = (triton.cdiv(a.numel(), BLOCK),)
        lerp_rows_kernel[grid](a, b, weight, a.numel(), a.shape[-1], BLOCK=BLOCK, num_warps=8)
    return a
