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
from .kernels.products import weight_gradient_gather_kernel
from .kernels.up_swiglu import up_swiglu_kernel
from .launch import TileConfig, descriptor
from .layout import ExpertLayout
from .saved import Save, SavedUp, empty_saved

UP = TileConfig(BN=128, BK=64, num_stages=3)
DOWN_BACKWARD = TileConfig(BN=128, BK=64, num_stages=4)
WEIGHT_GRADIENT = TileConfig(BN=256, BK=64, num_stages=3)


def up_fused(x_TD, w_up_E2ID, layout, save, gather):
    E, I2, D = w_up_E2ID.shape
    I, S = I2 // 2, layout.slots
    xs = x_TD if gather else launch.gather_rows(x_TD, layout)
    a = x_TD.new_empty(S, I)
    saved = empty_saved(S, I, save, x_TD.device) if save else None
    c = UP
    grid, options = c.launch_options(x_TD.device)
    up_swiglu_kernel[grid](
        None if gather else descriptor(xs, c.BM, c.BK), x_TD, layout.token_S, None, descriptor(w_up_E2ID.view(2 * E, I, D), 1, c.BN, c.BK), None,
        layout.score_S, layout.ends_E, layout.tile_expert_M,
        descriptor(a, c.BM, c.BN // 2), None,
        descriptor(saved.h_S2I, c.BM, 1, c.BN // 2) if saved else None, saved.scales if saved else None, None,
        E, S, D, I, FP8=False, SAVE=save or "nothing", GATHER=gather, **options,
    )  # fmt: skip
    return a, saved


def up(x_TD, w_up_E2ID, layout, save):
    xs = launch.gather_rows(x_TD, layout)
    h = F.grouped_mm(xs, w_up_E2ID.transpose(1, 2), offs=layout.ends_E).view(layout.slots, 2, -1)
    a, _, _, h8, h8_scale = launch.swiglu(h, layout, fp8=False, save_mx=save == "mxfp8")
    return a, (SavedUp(h if h8 is None else h8, h8_scale) if save else None)


def down(a_SI, w_down_EDI, layout):
    return F.grouped_mm(a_SI, w_down_EDI.transpose(1, 2), offs=layout.ends_E)


def down_backward_fused(dys, w_down_EDI, layout, saved):
    E, D, I = w_down_EDI.shape
    S = layout.slots
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
    return dh, None, a, dscore_NS.sum(0)


def wgrad_gather(dh, x_TD, layout):
    S, M = dh.shape
    E = layout.ends_E.numel()
    out = x_TD.new_empty(E, M, x_TD.shape[1])
    c = WEIGHT_GRADIENT
    grid, options = c.launch_options(out.device)
    weight_gradient_gather_kernel[grid](descriptor(dh, c.BK, c.BM), x_TD, layout.token_S, layout.ends_E, descriptor(out, 1, c.BM, c.BN), E, M, x_TD.shape[1], **options)
    return out


def backward(dy_TD, x_TD, w_up_E2ID, w_down_EDI, layout, saved):
    S = layout.slots
    dys = launch.gather_rows(dy_TD, layout)
    da = F.grouped_mm(dys, w_down_EDI.transpose(1, 2).contiguous().transpose(1, 2), offs=layout.ends_E)
    dh, _, a, dscore_S = launch.swiglu_backward(da, saved.h_S2I, saved.scales, layout)
    del da
    dw_down = F.grouped_mm(dys.t(), a, offs=layout.ends_E)
    del dys, a
    dh = dh.view(S, -1)
    dx_SD = F.grouped_mm(dh, w_up_E2ID, offs=layout.ends_E)
    dw_up = F.grouped_mm(dh.t(), launch.gather_rows(x_TD, layout), offs=layout.ends_E)
    return dx_SD, dw_up, dw_down, dscore_S
