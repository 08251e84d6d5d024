"""The fused path with e4m3 products on Hopper's tensor cores, float32 accumulation.

Every scale is a power of two, and none needs a pass of its own:

* inputs, output gradients and the activation between the products: one scale per row, exact, found by the pass that
  writes the row;
* weights: one scale per expert, so that the transposed copy holds the same numbers;
* the gradient of gate and up: one scale per row from a bound, |da_i| <= ||dy|| max_i ||w_down[:, i]|| (Cauchy-Schwarz)
  times the row's largest |gate| or |up|. e4m3 has 15 binades of full precision, so a bound that is 2**8 too large costs
  nothing measurable, and nothing can overflow;
* operands of the weight gradients, whose contraction runs over slots: the row scales of the two factors are moved into
  one of them, relative to the largest product of scales in the expert. A power of two changes no significand; only rows
  whose contribution is 2**-12 or less of the largest become subnormal.

Axes: T tokens, S slots, D model, I expert width, E experts, M tiles of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from . import launch
from .kernels.products import product_kernel, weight_gradient_kernel
from .launch import TileConfig, descriptor
from .layout import TILE, ExpertLayout
from .saved import Save, SavedUp

PRODUCT = TileConfig(BN=256, BK=128, num_stages=3)
WEIGHT_GRADIENT = TileConfig(BN=256, BK=128, num_stages=3)
SLOPE_BOUND = 1.1  # of silu
ROUNDING_MARGIN = 1.25  # what rounding dy and w_down to e4m3 (2**-4 each) can add to the bound


class E4M3Rows(NamedTuple):
    """Rows in e4m3, each with the power of two that it was divided by."""

    values_SX: Tensor
    scale_S: Float32[Tensor, " S"]


def up(
    x_TD: Float[Tensor, "T D"], w_up_E2ID: Float[Tensor, "E 2I D"], layout: ExpertLayout, save: Save | None
) -> tuple[E4M3Rows, SavedUp | None]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up (None if ``save`` is None)."""
    E, I2, D = w_up_E2ID.shape
    xs = launch.gather_rows_e4m3(x_TD, layout)
    h = product(E4M3Rows(xs.values_SD, xs.scale_S), w_up_E2ID, layout).view(layout.slots, 2, I2 // 2)
    a, a_scale, h_max, h8, h8_scale = launch.swiglu(h, layout, fp8=True, save_mx=save == "mxfp8")
    saved = None
    if save:
        saved = SavedUp(h if h8 is None else h8, h8_scale, xs.scale_S, a_scale, h_max)
    return E4M3Rows(a, a_scale), saved


def down(a: E4M3Rows, w_down_EDI: Float[Tensor, "E D I"], layout: ExpertLayout) -> Float[Tensor, "S D"]:
    return product(a, w_down_EDI, layout)


def backward(
    dy_TD: Float[Tensor, "T D"],
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E 2I D"],
    w_down_EDI: Float[Tensor, "E D I"],
    layout: ExpertLayout,
    saved: SavedUp,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [S, D], dw_up [E, 2I, D], dw_down [E, D, I] and dscore [S]."""
    S = layout.slots
    dys = launch.gather_rows_e4m3(dy_TD, layout, norm=True)
    da = product(E4M3Rows(dys.values_SD, dys.scale_S), w_down_EDI, layout, transposed=True)
    dh_scale_S = gradient_scale(dys.norm_S, w_down_EDI, layout, saved)
    dh, dh_t, a_t, dscore_S = launch.swiglu_backward(
        da, saved.h_S2I, saved.scales, layout, dh_scale_S=dh_scale_S, a_scale_S=saved.a_scale_S
    )
    del da
    dw_down = weight_gradient(dy_TD, dys.scale_S, a_t, saved.a_scale_S, layout, rows_left=True)
    del a_t, dys
    dw_up = weight_gradient(x_TD, saved.x_scale_S, dh_t, dh_scale_S, layout, rows_left=False)
    del dh_t
    dx = product(E4M3Rows(dh.view(S, -1), dh_scale_S), w_up_E2ID, layout, transposed=True)
    return dx, dw_up, dw_down, dscore_S


def product(
    rows: E4M3Rows, w_ENK: Float[Tensor, "E N K"], layout: ExpertLayout, *, transposed: bool = False
) -> Float[Tensor, "S N"]:
    """rows @ w[expert]^T, or rows @ w[expert] with ``transposed``, in the weights' dtype."""
    w_scale = launch.e4m3_scale(torch.linalg.vector_norm(w_ENK.flatten(1), torch.inf, dim=1, dtype=torch.float32))
    w8 = launch.quantize_weight(w_ENK, w_scale, transposed=transposed)
    E, N, K = w8.shape
    out = w_ENK.new_empty(layout.slots, N)
    c = PRODUCT
    grid, options = c.launch_options(out.device)
    product_kernel[grid](
        descriptor(rows.values_SX, c.BM, c.BK), rows.scale_S, descriptor(w8, 1, c.BN, c.BK), w_scale,
        layout.ends_E, layout.tile_expert_M, descriptor(out, c.BM, c.BN), E, layout.slots, N, K,
        SCALE_BLOCK=0, **options,
    )  # fmt: skip
    return out


def gradient_scale(
    norm_S: Float32[Tensor, " S"], w_down_EDI: Float[Tensor, "E D I"], layout: ExpertLayout, saved: SavedUp
) -> Float32[Tensor, " S"]:
    """Power of two per slot that bounds the gradient of gate and up over 448."""
    column_norm_E = torch.linalg.vector_norm(w_down_EDI, dim=1, dtype=torch.float32).amax(1)
    bound_S = norm_S * saved.h_max_S * layout.score_S.abs() * per_slot(column_norm_E, layout)
    return launch.e4m3_scale(bound_S * (SLOPE_BOUND * ROUNDING_MARGIN))


def weight_gradient(
    row_TX: Float[Tensor, "T X"],
    row_scale_S: Float32[Tensor, " S"],
    tiles_MYB: Tensor,
    tiles_scale_S: Float32[Tensor, " S"],
    layout: ExpertLayout,
    *,
    rows_left: bool,
) -> Tensor:
    """Per expert, sum over its slots of the outer products of two sets of rows: [E, X, Y] with ``rows_left``, else [E, Y, X].

    ``tiles_MYB`` is in e4m3 already; the rows of ``row_TX`` take over its scales while they are gathered.
    """
    E = layout.ends_E.numel()
    unit_S = torch.where(layout.token_S >= 0, row_scale_S * tiles_scale_S, 0.0)
    unit_M = unit_S.view(-1, TILE).amax(1)
    unit_E = unit_M.new_zeros(E + 1).scatter_reduce(0, layout.tile_expert_M.long(), unit_M, "amax")
    unit_E = unit_E[:E].clamp(min=torch.finfo(torch.float32).tiny)
    rows_MXB = launch.gather_transposed_e4m3(row_TX, tiles_scale_S / per_slot(unit_E, layout), layout)
    left, right = (rows_MXB, tiles_MYB) if rows_left else (tiles_MYB, rows_MXB)
    out = row_TX.new_empty(E, left.shape[1], right.shape[1])
    c = WEIGHT_GRADIENT
    grid, options = c.launch_options(out.device)
    weight_gradient_kernel[grid](
        descriptor(left, 1, c.BM, c.BK), descriptor(right, 1, c.BN, c.BK), unit_E, layout.ends_E,
        descriptor(out, 1, c.BM, c.BN), E, *out.shape[1:], ACCUMULATE=False, **options,
    )  # fmt: skip
    return out


def per_slot(value_E: Float32[Tensor, " E"], layout: ExpertLayout) -> Float32[Tensor, " S"]:
    """Each slot's expert's value; slots past the last segment get the last expert's."""
    expert_M = layout.tile_expert_M.long().clamp(max=value_E.numel() - 1)
    return value_E[expert_M].repeat_interleave(TILE, output_size=layout.slots)
