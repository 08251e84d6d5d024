"""The fused path with bfloat16 products.

On Hopper they are Triton's, persistent, each tile's loads under way while the tile before is stored: up to a quarter
faster there than torch's grouped product (CUTLASS), which is taken on other GPUs.

Axes: T tokens, S slots, D model, I expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from . import launch
from .launch import TileConfig
from .layout import ExpertLayout
from .saved import Save, SavedUp

HOPPER = TileConfig(BK=64)


class BackwardWeights(NamedTuple):
    w_up_E2ID: Tensor
    w_down_EDI: Tensor


def measure(w: Tensor) -> None:
    """What has to be known of a weight before it can be prepared: nothing."""


def prepare(w: Tensor, measured: None) -> Tensor:
    """A weight as `up` or `down` wants it: as it is."""
    return w


def prepare_backward(
    w_up_E2ID: Float[Tensor, "E I2 D"], w_down_EDI: Float[Tensor, "E D I"], up_measured: None, down_measured: None
) -> BackwardWeights:
    """Both weights as they are."""
    return BackwardWeights(w_up_E2ID, w_down_EDI)


def up(
    x_TD: Float[Tensor, "T D"], w_up_E2ID: Float[Tensor, "E I2 D"], layout: ExpertLayout, save: Save | None
) -> tuple[Tensor, SavedUp]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up."""
    xs = launch.spread_rows(x_TD, layout, fp8=False).values_SX
    h = product(xs, w_up_E2ID, layout)
    a, saved = launch.swiglu_rows(h.view(layout.slots, 2, -1), layout, fp8=False, save=save)
    return a.values_SX, saved


def down(a_SI: Float[Tensor, "S I"], w_down_EDI: Float[Tensor, "E D I"], layout: ExpertLayout) -> Float[Tensor, "S D"]:
    return product(a_SI, w_down_EDI, layout)


def backward(
    dy_TD: Float[Tensor, "T D"],
    x_TD: Float[Tensor, "T D"],
    weights: BackwardWeights,
    layout: ExpertLayout,
    saved: SavedUp,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [S, D], dw_up [E, 2I, D], dw_down [E, D, I] and dscore [S]."""
    dys = launch.spread_rows(dy_TD, layout, fp8=False).values_SX
    da = product(dys, weights.w_down_EDI, layout, kn=True)
    dh, a, dscore_S = launch.swiglu_backward_rows(da, saved, layout)
    del da
    dw_down = weight_gradient(dys, a, layout)
    del dys, a
    dx = product(dh, weights.w_up_E2ID, layout, kn=True)
    xs = launch.spread_rows(x_TD, layout, fp8=False).values_SX
    dw_up = weight_gradient(dh, xs, layout)
    return dx, dw_up, dw_down, dscore_S


def product(a_SK: Float[Tensor, "S K"], w: Tensor, layout: ExpertLayout, *, kn: bool = False) -> Float[Tensor, "S N"]:
    """a @ w[expert of the row]^T, with w [E, N, K]; with ``kn`` a @ w[expert of the row], w [E, K, N]."""
    if not triton_pays(w.device):
        return F.grouped_mm(a_SK, w if kn else w.transpose(1, 2), offs=layout.ends_E)
    return launch.grouped_product(a_SK, None, w, None, layout, HOPPER, kn=kn)


def weight_gradient(
    left_SX: Float[Tensor, "S X"], right_SY: Float[Tensor, "S Y"], layout: ExpertLayout
) -> Float[Tensor, "E X Y"]:
    """Per expert, left[slots of e]^T @ right[slots of e]."""
    if not triton_pays(left_SX.device):
        return F.grouped_mm(left_SX.t(), right_SY, offs=layout.ends_E)
    return launch.weight_gradient_bf16(left_SX, right_SY, layout, HOPPER)


def triton_pays(device: torch.device) -> bool:
    """Whether the products are Triton's: on Hopper, and on the CPU for the interpreter."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9
