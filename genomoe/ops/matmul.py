"""Products whose result is wider than their operands."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def wide_mm(a_MN: Float[Tensor, "M N"], b_NO: Float[Tensor, "N O"]) -> Float[Tensor, "M O"]:
    """a b with a float32 result that was never rounded to the operands' dtype."""
    if a_MN.dtype == torch.float32:
        return a_MN @ b_NO
    if a_MN.is_cuda:
        return torch.mm(a_MN, b_NO, out_dtype=torch.float32)
    return a_MN.float() @ b_NO.float()
