"""The fused path with MXFP8 operands in every product: blocks of 32 along whatever dimension is contracted.

On Blackwell (compute capability 10) the tensor cores multiply them as they are, scales included. Elsewhere both
operands are dequantised to bfloat16, which is exact, in a pass of its own, and multiplied as such: the same numbers,
for checking and for reproducing a Blackwell run, at less than bfloat16's speed.

Axes: T tokens, S slots, D model, I expert width, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..mxfp8 import MXFP8
from . import launch, products_bf16
from .kernels.products import weight_gradient_kernel
from .launch import TileConfig, descriptor
from .layout import ExpertLayout
from .saved import Save, SavedUp

NATIVE = TileConfig(BN=128, num_stages=4)


class BackwardWeights(NamedTuple):
    up_EDI2: MXFP8
    down_EID: MXFP8


def measure(w: Tensor) -> None:
    """What has to be known of a weight before it can be prepared: nothing."""


def prepare(w: Float[Tensor, "E N K"], measured: None) -> MXFP8:
    """A weight as `up` or `down` wants it."""
    return launch.quantize_mx(w)


def prepare_backward(
    w_up_E2ID: Float[Tensor, "E I2 D"], w_down_EDI: Float[Tensor, "E D I"], up_measured: None, down_measured: None
) -> BackwardWeights:
    """Quantised along the other dimension, which backward contracts."""
    return BackwardWeights(
        launch.quantize_mx(w_up_E2ID, transposed=True), launch.quantize_mx(w_down_EDI, transposed=True)
    )


def up(x_TD: Float[Tensor, "T D"], w_up: MXFP8, layout: ExpertLayout, save: Save | None) -> tuple[Tensor, SavedUp]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up."""
    xs = launch.spread_rows(x_TD, layout, fp8=False).values_SX
    h = product(launch.quantize_mx(xs), w_up, layout)
    a, saved = launch.swiglu_rows(h.view(layout.slots, 2, -1), layout, fp8=False, save=save)
    return a.values_SX, saved


def down(a_SI: Float[Tensor, "S I"], w_down: MXFP8, layout: ExpertLayout) -> Float[Tensor, "S D"]:
    return product(launch.quantize_mx(a_SI), w_down, layout)


def backward(
    dy_TD: Float[Tensor, "T D"],
    x_TD: Float[Tensor, "T D"],
    weights: BackwardWeights,
    layout: ExpertLayout,
    saved: SavedUp,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [S, D], dw_up [E, 2I, D], dw_down [E, D, I] and dscore [S]."""
    dys = launch.spread_rows(dy_TD, layout, fp8=False).values_SX
    da = product(launch.quantize_mx(dys), weights.down_EID, layout)
    dh, a, dscore_S = launch.swiglu_backward_rows(da, saved, layout)
    del da
    dw_down = weight_gradient(dys, a, layout)
    del dys, a
    dx = product(launch.quantize_mx(dh), weights.up_EDI2, layout)
    xs = launch.spread_rows(x_TD, layout, fp8=False).values_SX
    dw_up = weight_gradient(dh, xs, layout)
    return dx, dw_up, dw_down, dscore_S


def multiplies_natively(device: torch.device) -> bool:
    """Whether the tensor cores take MXFP8 operands. The interpreter runs the native kernels on the CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 10


def product(a: MXFP8, w: MXFP8, layout: ExpertLayout) -> Float[Tensor, "S N"]:
    """a @ w[expert of the row]^T in bfloat16. ``a`` [S, K], ``w`` [E, N, K]."""
    if not multiplies_natively(a.elements.device):
        return products_bf16.product(launch.dequantize_mx(a), launch.dequantize_mx(w), layout)
    return launch.grouped_product(a.elements, a.scales, w.elements, w.scales, layout, NATIVE, mx=True)


def weight_gradient(
    left_SM: Float[Tensor, "S M"], right_SN: Float[Tensor, "S N"], layout: ExpertLayout
) -> Float[Tensor, "E M N"]:
    """Per expert, left[slots of e]^T @ right[slots of e], both rounded to MXFP8 along the slots."""
    left, right = (launch.quantize_mx(rows, transposed=True) for rows in (left_SM, right_SN))
    if not multiplies_natively(left_SM.device):
        return F.grouped_mm(launch.dequantize_mx(left), launch.dequantize_mx(right).t(), offs=layout.ends_E)
    E, M, N = layout.num_experts, left_SM.shape[1], right_SN.shape[1]
    out = left_SM.new_empty(E, M, N)
    c = NATIVE
    grid, options = c.launch_options(out.device)
    weight_gradient_kernel[grid](
        descriptor(left.elements, c.BM, c.BK), left.scales, descriptor(right.elements, c.BN, c.BK), right.scales,
        None, layout.ends_E, descriptor(out, 1, c.BM, c.BN), E, layout.slots, M, N, MX=True, **options,
    )  # fmt: skip
    return out
