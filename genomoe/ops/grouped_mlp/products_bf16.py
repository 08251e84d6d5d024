"""The fused path with bfloat16 products.

The two products whose neighbours are pointwise run in Triton, with SwiGLU, score and quantisation in the epilogue; the
other four are torch's grouped product (CUTLASS), which on Hopper is within 3-17 % of the ceiling.

Axes: T tokens, S slots, D model, I expert width, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from . import launch
from .kernels.down_backward import down_backward_kernel
from .kernels.up_swiglu import up_swiglu_kernel
from .launch import TileConfig, descriptor
from .layout import ExpertLayout
from .saved import Save, SavedUp, empty_saved

UP = TileConfig(BN=128, BK=64, num_stages=4)
DOWN_BACKWARD = TileConfig(BN=128, BK=64, num_stages=4)


def up(
    x_TD: Float[Tensor, "T D"], w_up_E2ID: Float[Tensor, "E 2I D"], layout: ExpertLayout, save: Save | None
) -> tuple[Float[Tensor, "S I"], SavedUp | None]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up (None if ``save`` is None)."""
    E, I2, D = w_up_E2ID.shape
    I, S = I2 // 2, layout.slots
    xs = launch.gather_rows(x_TD, layout)
    a = x_TD.new_empty(S, I)
    saved = empty_saved(S, I, save, x_TD.device) if save else None
    c = UP
    grid, options = c.launch_options(x_TD.device)
    up_swiglu_kernel[grid](
        descriptor(xs, c.BM, c.BK), None, descriptor(w_up_E2ID.view(2 * E, I, D), 1, c.BN, c.BK), None,
        layout.score_S, layout.ends_E, layout.tile_expert_M,
        descriptor(a, c.BM, c.BN // 2), None,
        descriptor(saved.h_S2I, c.BM, 1, c.BN // 2) if saved else None, saved.scales if saved else None, None,
        E, S, D, I, FP8=False, SAVE=save or "nothing", **options,
    )  # fmt: skip
    return a, saved


def down(
    a_SI: Float[Tensor, "S I"], w_down_EDI: Float[Tensor, "E D I"], layout: ExpertLayout
) -> Float[Tensor, "S D"]:
    return F.grouped_mm(a_SI, w_down_EDI.transpose(1, 2), offs=layout.ends_E)


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
    S = layout.slots
    dys = launch.gather_rows(dy_TD, layout)
    dh = dys.new_empty(S, 2, I)
    a = dys.new_empty(S, I)
    c = DOWN_BACKWARD
    dscore_NS = torch.empty(-(-I // c.BN), S, dtype=torch.float32, device=dys.device)
    grid, options = c.launch_options(dys.device)
    down_backward_kernel[grid](
        descriptor(dys, c.BM, c.BK), None, descriptor(w_down_EDI, 1, c.BK, c.BN), None,
        layout.score_S, layout.ends_E, layout.tile_expert_M,
        descriptor(saved.h_S2I, c.BM, 1, c.BN // 2), saved.scales,
        descriptor(dh, c.BM, 1, c.BN // 2), None, None, descriptor(a, c.BM, c.BN // 2), None, dscore_NS,
        E, S, D, I, FP8=False, SAVE=saved.format, **options,
    )  # fmt: skip
    dw_down = F.grouped_mm(dys.t(), a, offs=layout.ends_E)
    del dys, a
    dh = dh.view(S, 2 * I)
    dx_SD = F.grouped_mm(dh, w_up_E2ID, offs=layout.ends_E)
    dw_up = F.grouped_mm(dh.t(), launch.gather_rows(x_TD, layout), offs=layout.ends_E)
    return dx_SD, dw_up, dw_down, dscore_NS.sum(0)
