"""The fused path with e4m3 products on Hopper's tensor cores, float32 accumulation.

Every scale is a power of two, and the passes that write the operands find them on the way:

* rows of inputs, output gradients and, forward, activations: one exact scale per row;
* rows of gradients of gate and up and, backward, activations: one scale per row from a bound on its largest magnitude,
  so that a value is written for both of its products, as rows and transposed, as soon as it is known;
* weights: one scale per expert, so that the transposed copy holds the same numbers. e4m3 has 15 binades of full
  precision below the largest weight;
* operands of the weight gradients, whose contraction runs over slots: the row scales of the two factors are moved into
  one of them, relative to the largest product of scales in the expert. A power of two changes no significand; only rows
  whose contribution is 2**-12 or less of the largest become subnormal.

Axes: T tokens, S slots, D model, I expert width, E experts, M tiles of 128 slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from . import launch
from .kernels.products import weight_gradient_kernel
from .launch import ScaledRows, TileConfig, descriptor
from .layout import TILE, ExpertLayout
from .saved import Save, SavedUp

PRODUCT = TileConfig()
WEIGHT_GRADIENT = TileConfig()


class E4M3Weight(NamedTuple):
    """Every expert's matrix in e4m3, divided by the expert's power of two; the last dimension is contracted."""

    values_ENK: Tensor
    scale_E: Float32[Tensor, " E"]


class BackwardWeights(NamedTuple):
    up_EDI2: E4M3Weight
    down_EID: E4M3Weight


def measure(w_ENK: Float[Tensor, "E N K"]) -> Float32[Tensor, " E"]:
    """What has to be known of a weight before it can be prepared: each expert's largest magnitude."""
    return torch.linalg.vector_norm(w_ENK.flatten(1), torch.inf, dim=1, dtype=torch.float32)


def prepare(w_ENK: Float[Tensor, "E N K"], measured: Float32[Tensor, " E"]) -> E4M3Weight:
    """A weight as `up` or `down` wants it."""
    return E4M3Weight(*launch.weight_e4m3(w_ENK, measured, transposed=False))


def prepare_backward(
    w_up_E2ID: Float[Tensor, "E I2 D"],
    w_down_EDI: Float[Tensor, "E D I"],
    up_measured: Float32[Tensor, " E"],
    down_measured: Float32[Tensor, " E"],
) -> BackwardWeights:
    """The transposes of both, with the same numbers."""
    return BackwardWeights(
        E4M3Weight(*launch.weight_e4m3(w_up_E2ID, up_measured, transposed=True)),
        E4M3Weight(*launch.weight_e4m3(w_down_EDI, down_measured, transposed=True)),
    )


def up(
    x_TD: Float[Tensor, "T D"], w_up: E4M3Weight, layout: ExpertLayout, save: Save | None
) -> tuple[ScaledRows, SavedUp]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up."""
    xs = launch.spread_rows(x_TD, layout, fp8=True)
    h = product(xs, w_up, layout)
    a, saved = launch.swiglu_rows(h.view(layout.slots, 2, -1), layout, fp8=True, save=save)
    return a, saved._replace(x_scale_T=xs.scale_T)


def down(a: ScaledRows, w_down: E4M3Weight, layout: ExpertLayout) -> Float[Tensor, "S D"]:
    return product(a, w_down, layout)


def backward(
    dy_TD: Float[Tensor, "T D"],
    x_TD: Float[Tensor, "T D"],
    weights: BackwardWeights,
    layout: ExpertLayout,
    saved: SavedUp,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [S, D], dw_up [E, 2I, D], dw_down [E, D, I] and dscore [S]."""
    dys = launch.spread_rows(dy_TD, layout, fp8=True)
    column_tiles = -(-weights.down_EID.values_ENK.shape[1] // PRODUCT.BN)
    largest_NS = torch.empty(column_tiles, layout.slots, dtype=torch.float32, device=dy_TD.device)
    da = product(dys, weights.down_EID, layout, largest_NS)
    grad = launch.swiglu_backward_e4m3(da, largest_NS, saved, dys.scale_S, layout)
    del da, dys
    dy_MDB = launch.gather_transposed(dy_TD, grad.a_scale_S, grad.down_unit_E, layout)
    dw_down = weight_gradient(dy_MDB, grad.a_MCB, grad.down_unit_E, layout)
    del dy_MDB
    x_MDB = launch.gather_transposed(x_TD, grad.dh.scale_S, grad.up_unit_E, layout)
    dw_up = weight_gradient(grad.dh_MCB, x_MDB, grad.up_unit_E, layout)
    dx = product(grad.dh, weights.up_EDI2, layout)
    return dx, dw_up, dw_down, grad.dscore_S


def product(
    rows: ScaledRows, w: E4M3Weight, layout: ExpertLayout, largest_NS: Float32[Tensor, "N S"] | None = None
) -> Float[Tensor, "S X"]:
    """rows @ w[expert of the row]^T in bfloat16; ``largest_NS`` as in `launch.grouped_product`."""
    return launch.grouped_product(
        rows.values_SX, rows.scale_S, w.values_ENK, w.scale_E, layout, PRODUCT, largest_NS=largest_NS
    )


def weight_gradient(left_MXB: Tensor, right_MYB: Tensor, unit_E: Float32[Tensor, " E"], layout: ExpertLayout) -> Tensor:
    """Per expert, left @ right^T over its slots [E, X, Y] in bfloat16, times ``unit_E``; e4m3, slots contiguous."""
    E, X, Y = layout.num_experts, left_MXB.shape[1], right_MYB.shape[1]
    out = torch.empty(E, X, Y, dtype=torch.bfloat16, device=unit_E.device)
    c = WEIGHT_GRADIENT
    grid, options = c.launch_options(out.device)
    weight_gradient_kernel[grid](
        descriptor(left_MXB, 1, c.BM, TILE), None, descriptor(right_MYB, 1, c.BN, TILE), None, unit_E, layout.ends_E,
        descriptor(out, 1, c.BM, c.BN), E, layout.slots, X, Y, MX=False, **options,
    )  # fmt: skip
    return out
