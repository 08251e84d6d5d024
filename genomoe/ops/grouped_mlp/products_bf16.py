"""The fused path with bfloat16 products: torch's grouped product (CUTLASS), which on Hopper is near the ceiling.

Axes: T tokens, S slots, D model, I expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from . import launch
from .layout import ExpertLayout
from .saved import Save, SavedUp


class BackwardWeights(NamedTuple):
    w_up_E2ID: Tensor
    w_down_EID: Tensor


def measure(w: Tensor) -> None:
    """What has to be known of a weight before it can be prepared: nothing."""


def prepare(w: Tensor, measured: None) -> Tensor:
    """A weight as `up` or `down` wants it: as it is."""
    return w


def prepare_backward(
    w_up_E2ID: Float[Tensor, "E I2 D"], w_down_EDI: Float[Tensor, "E D I"], up_measured: None, down_measured: None
) -> BackwardWeights:
    """A transposed copy of w_down is cheap beside the tokens and makes its product a fifth faster on an H200."""
    return BackwardWeights(w_up_E2ID, launch.transpose_weight(w_down_EDI))


def up(
    x_TD: Float[Tensor, "T D"], w_up_E2ID: Float[Tensor, "E I2 D"], layout: ExpertLayout, save: Save | None
) -> tuple[Tensor, SavedUp]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up."""
    xs = launch.spread_rows(x_TD, layout, fp8=False).values_SX
    h = F.grouped_mm(xs, w_up_E2ID.transpose(1, 2), offs=layout.ends_E)
    a, saved = launch.swiglu_rows(h.view(layout.slots, 2, -1), layout, fp8=False, save_mx=save == "mxfp8")
    return a.values_SX, saved


def down(a_SI: Float[Tensor, "S I"], w_down_EDI: Float[Tensor, "E D I"], layout: ExpertLayout) -> Float[Tensor, "S D"]:
    return F.grouped_mm(a_SI, w_down_EDI.transpose(1, 2), offs=layout.ends_E)


def backward(
    dy_TD: Float[Tensor, "T D"],
    x_TD: Float[Tensor, "T D"],
    weights: BackwardWeights,
    layout: ExpertLayout,
    saved: SavedUp,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [S, D], dw_up [E, 2I, D], dw_down [E, D, I] and dscore [S]."""
    dys = launch.spread_rows(dy_TD, layout, fp8=False).values_SX
    da = F.grouped_mm(dys, weights.w_down_EID.transpose(1, 2), offs=layout.ends_E)
    dh, a, dscore_S = launch.swiglu_backward_rows(da, saved, layout)
    del da
    dw_down = F.grouped_mm(dys.t(), a, offs=layout.ends_E)
    del dys, a
    dx = F.grouped_mm(dh, weights.w_up_E2ID, offs=layout.ends_E)
    xs = launch.spread_rows(x_TD, layout, fp8=False).values_SX
    dw_up = F.grouped_mm(dh.t(), xs, offs=layout.ends_E)
    return dx, dw_up, dw_down, dscore_S
