"""What the fused path keeps of gate and up between forward and backward."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Save = Literal["bf16", "mxfp8"]


class SavedUp(NamedTuple):
    """Gate and up in slot order. Axes: S slots, I expert width."""

    h: Tensor | None
    """[S, 2, I] in bf16 or the e4m3 elements of MXFP8; of QuACK's products [S, I, 2] in bf16; None: not kept."""
    scales: Tensor | None
    """uint8 [S, 2, I/32]: MXFP8 scale bytes; None for bf16."""
    x_scale_T: Tensor | None = None
    """float32: the power of two that each token's row was divided by (fp8 products only)."""
    largest_2S: Tensor | None = None
    """float32: each row's largest |silu(gate)| and |up| (fp8 products only)."""
