"""What the fused path keeps of gate and up between forward and backward."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Save = Literal["bf16", "mxfp8"]


class SavedUp(NamedTuple):
    """Gate and up in slot order, with the row statistics from which backward takes its e4m3 scales.

    Axes: S slots, I expert width.
    """

    h_S2I: Tensor
    """bf16, or the e4m3 elements of MXFP8."""
    scales: Tensor | None
    """uint8 [S, 2, I/32]: MXFP8 scale bytes; None for bf16."""
    x_scale_S: Tensor | None = None
    """float32: power of two of the gathered input row (fp8 products only)."""
    a_scale_S: Tensor | None = None
    """float32: power of two that bounds silu(gate) up score over the row / 448 (fp8 products only)."""
    h_max_S: Tensor | None = None
    """float32: largest |gate| or |up| of the row (fp8 products only)."""

    @property
    def format(self) -> Save:
        return "bf16" if self.scales is None else "mxfp8"


def empty_saved(slots: int, width: int, save: Save, device: torch.device) -> SavedUp:
    if save == "bf16":
        return SavedUp(torch.empty(slots, 2, width, dtype=torch.bfloat16, device=device), None)
    return SavedUp(
        torch.empty(slots, 2, width, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(slots, 2, width // 32, dtype=torch.uint8, device=device),
    )
