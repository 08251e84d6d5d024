"""The fused path with e4m3 products on Hopper's tensor cores, float32 accumulation.

Every scale is a power of two, and none needs a pass of its own:

* inputs and output gradients: one scale per row, exact, found while the row is gathered;
* weights: one scale per expert, so that the transposed copy holds the same numbers;
* the activation between the products: one scale per row and 128 columns, exact, found in the epilogue;
* the gradient of gate and up: one scale per row from a bound, |da_i| <= ||dy|| max_i ||w_down[:, i]|| (Cauchy-Schwarz)
  times the row's largest |gate| or |up|. e4m3 has 15 binades of full precision, so a bound that is 2**8 too large costs
  nothing measurable, and nothing can overflow;
* operands of the weight gradients, whose contraction runs over slots: the row scales of the two factors are moved into
  one of them, relative to the largest product of scales in the expert. A power of two changes no significand; only rows
  whose contribution is 2**-12 or less of the largest become subnormal.

Axes: T tokens, S slots, D model, I expert width, E experts, M tiles of rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from . import launch
from .kernels.down_backward import down_backward_kernel
from .kernels.products import product_kernel, weight_gradient_kernel
from .kernels.up_swiglu import up_swiglu_kernel
from .launch import TileConfig, descriptor
from .layout import TILE, ExpertLayout
from .saved import Save, SavedUp, empty_saved

UP = TileConfig(BN=128, BK=128, num_stages=3)
DOWN = TileConfig(BN=128, BK=128, num_stages=4)
DOWN_BACKWARD = TileConfig(BN=128, BK=128, num_stages=4)
PRODUCT = TileConfig(BN=256, BK=128, num_stages=3)
WEIGHT_GRADIENT = TileConfig(BN=256, BK=128, num_stages=3)
SLOPE_BOUND = 1.1  # of silu
ROUNDING_MARGIN = 1.25  # what rounding dy and w_down to e4m3 (2**-4 each) can add to the bound


class E4M3Activation:
    """silu(gate) up score in e4m3 with the scales of its rows and 128-column blocks."""

    def __init__(self, values_SI: Tensor, scale_NS: Float32[Tensor, "N S"]):
        self.values_SI = values_SI
        self.scale_NS = scale_NS


def up(
    x_TD: Float[Tensor, "T D"], w_up_E2ID: Float[Tensor, "E 2I D"], layout: ExpertLayout, save: Save | None
) -> tuple[E4M3Activation, SavedUp | None]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up (None if ``save`` is None)."""
    E, I2, D = w_up_E2ID.shape
    I, S, device = I2 // 2, layout.slots, x_TD.device
    xs = launch.gather_rows_e4m3(x_TD, layout)
    w_scale = weight_scale(w_up_E2ID)
    w8 = launch.quantize_weight(w_up_E2ID, w_scale, transposed=False)
    c = UP
    tiles_n = -(-I // c.BN)
    a = E4M3Activation(
        torch.empty(S, I, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(tiles_n, S, dtype=torch.float32, device=device),
    )
    h_max_NS = torch.empty(tiles_n, S, dtype=torch.float32, device=device)
    saved = empty_saved(S, I, save, device) if save else None
    grid, options = c.launch_options(device)
    up_swiglu_kernel[grid](
        descriptor(xs.values_SD, c.BM, c.BK), xs.scale_S, descriptor(w8.view(2 * E, I, D), 1, c.BN, c.BK), w_scale,
        layout.score_S, layout.ends_E, layout.tile_expert_M,
        descriptor(a.values_SI, c.BM, c.BN // 2), a.scale_NS,
        descriptor(saved.h_S2I, c.BM, 1, c.BN // 2) if saved else None, saved.scales if saved else None, h_max_NS,
        E, S, D, I, FP8=True, SAVE=save or "nothing", **options,
    )  # fmt: skip
    if saved:
        saved = saved._replace(x_scale_S=xs.scale_S, a_scale_S=a.scale_NS.amax(0), h_max_S=h_max_NS.amax(0))
    return a, saved


def down(
    a: E4M3Activation, w_down_EDI: Float[Tensor, "E D I"], layout: ExpertLayout
) -> Float[Tensor, "S D"]:
    E, D, I = w_down_EDI.shape
    w_scale = weight_scale(w_down_EDI)
    w8 = launch.quantize_weight(w_down_EDI, w_scale, transposed=False)
    out = w_down_EDI.new_empty(layout.slots, D)
    c = DOWN
    grid, options = c.launch_options(out.device)
    product_kernel[grid](
        descriptor(a.values_SI, c.BM, c.BK), a.scale_NS, descriptor(w8, 1, c.BN, c.BK), w_scale,
        layout.ends_E, layout.tile_expert_M, descriptor(out, c.BM, c.BN), E, layout.slots, D, I,
        SCALE_BLOCK=UP.BN, **options,
    )  # fmt: skip
    return out


def backward(
    dy_TD: Float[Tensor, "T D"],
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E 2I D"],
    w_down_EDI: Float[Tensor, "E D I"],
    layout: ExpertLayout,
    saved: SavedUp,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [S, D], dw_up [E, 2I, D], dw_down [E, D, I] and dscore [S]."""
    E, D, I = w_down_EDI.shape
    S, device = layout.slots, dy_TD.device
    dys = launch.gather_rows_e4m3(dy_TD, layout, norm=True)
    w_scale = weight_scale(w_down_EDI)
    w8_t = launch.quantize_weight(w_down_EDI, w_scale, transposed=True)
    dh_scale_S = gradient_scale(dys.norm_S, w_down_EDI, layout, saved)

    dh = torch.empty(S, 2, I, dtype=torch.float8_e4m3fn, device=device)
    dh_t = torch.empty(2, I, S, dtype=torch.float8_e4m3fn, device=device)
    a_t = torch.empty(I, S, dtype=torch.float8_e4m3fn, device=device)
    c = DOWN_BACKWARD
    dscore_NS = torch.empty(-(-I // c.BN), S, dtype=torch.float32, device=device)
    grid, options = c.launch_options(device)
    down_backward_kernel[grid](
        descriptor(dys.values_SD, c.BM, c.BK), dys.scale_S, descriptor(w8_t, 1, c.BN, c.BK), w_scale,
        layout.score_S, layout.ends_E, layout.tile_expert_M,
        descriptor(saved.h_S2I, c.BM, 1, c.BN // 2), saved.scales,
        descriptor(dh, c.BM, 1, c.BN // 2), dh_scale_S, descriptor(dh_t, 1, c.BN // 2, c.BM),
        descriptor(a_t, c.BN // 2, c.BM), saved.a_scale_S, dscore_NS,
        E, S, D, I, FP8=True, SAVE=saved.format, **options,
    )  # fmt: skip

    dw_down = weight_gradient(dy_TD, dys.scale_S, a_t, saved.a_scale_S, layout, E, gradient_is_left=False)
    del a_t, dys
    dw_up = weight_gradient(x_TD, saved.x_scale_S, dh_t.view(2 * I, S), dh_scale_S, layout, E, gradient_is_left=True)
    del dh_t

    w_scale = weight_scale(w_up_E2ID)
    w8_t = launch.quantize_weight(w_up_E2ID, w_scale, transposed=True)
    dx = w_up_E2ID.new_empty(S, D)
    c = PRODUCT
    grid, options = c.launch_options(device)
    product_kernel[grid](
        descriptor(dh.view(S, 2 * I), c.BM, c.BK), dh_scale_S, descriptor(w8_t, 1, c.BN, c.BK), w_scale,
        layout.ends_E, layout.tile_expert_M, descriptor(dx, c.BM, c.BN), E, S, D, 2 * I,
        SCALE_BLOCK=0, **options,
    )  # fmt: skip
    return dx, dw_up, dw_down, dscore_NS.sum(0)


def weight_scale(w_ERC: Float[Tensor, "E R C"]) -> Float32[Tensor, " E"]:
    return launch.e4m3_scale(w_ERC.flatten(1).abs().amax(1))


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
    transposed_YS: Tensor,
    transposed_scale_S: Float32[Tensor, " S"],
    layout: ExpertLayout,
    num_experts: int,
    *,
    gradient_is_left: bool,
) -> Tensor:
    """Per expert, sum over its slots of the outer products of two sets of rows: bf16 [E, Y, X], or [E, X, Y].

    ``transposed_YS`` is in e4m3 already; the rows of ``row_TX`` take over its scales while they are gathered.
    """
    unit_S = row_scale_S * transposed_scale_S
    used_S = torch.where(layout.token_S >= 0, unit_S, 0.0)
    unit_M = used_S.view(-1, TILE).amax(1)
    unit_E = unit_M.new_zeros(num_experts + 1).scatter_reduce(0, layout.tile_expert_M.long(), unit_M, "amax")
    unit_E = unit_E[:num_experts].clamp(min=torch.finfo(torch.float32).tiny)
    factor_S = transposed_scale_S / per_slot(unit_E, layout)
    rows_XS = launch.gather_transposed_e4m3(row_TX, factor_S, layout)
    left, right = (transposed_YS, rows_XS) if gradient_is_left else (rows_XS, transposed_YS)
    out = row_TX.new_empty(num_experts, left.shape[0], right.shape[0])
    c = WEIGHT_GRADIENT
    grid, options = c.launch_options(out.device)
    weight_gradient_kernel[grid](
        descriptor(left, c.BM, c.BK), descriptor(right, c.BN, c.BK), unit_E, layout.ends_E,
        descriptor(out, 1, c.BM, c.BN), num_experts, *out.shape[1:], ACCUMULATE=False, **options,
    )  # fmt: skip
    return out


def per_slot(value_E: Float32[Tensor, " E"], layout: ExpertLayout) -> Float32[Tensor, " S"]:
    """Each slot's expert's value; slots past the last segment get the last expert's."""
    expert_M = layout.tile_expert_M.long().clamp(max=value_E.numel() - 1)
    return value_E[expert_M].repeat_interleave(TILE, output_size=layout.slots)
