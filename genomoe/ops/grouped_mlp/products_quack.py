"""The fused path with QuACK's bfloat16 products, whose epilogues hold SwiGLU and its gradient.

The interface is that of `products_bf16`, and so are the results but for rounding: gate and up are not rounded before
SwiGLU is formed. What is kept for backward has gate and up side by side, [S, I, 2].

Axes: T tokens, S slots, D model, I expert width, E experts.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from . import launch, launch_quack
from .launch_quack import Tile
from .layout import ExpertLayout
from .products_bf16 import BackwardWeights, measure, prepare, prepare_backward
from .saved import Save, SavedUp

__all__ = ["backward", "down", "measure", "prepare", "prepare_backward", "up"]


NARROW_EXPERTS = 1024
"""Expert width up to which rows are gathered as they are loaded: a copy of them costs much beside such products."""

# The fastest of up to ten tiles for each product of three layer shapes, on an H200 at its power limit.
WIDE = Tile(128, 256)
UP = Tile(128, 192, pingpong=True)
UP_ALONE = Tile(192, 128, pingpong=True)
"""Where gate and up are not kept."""
DOWN_NARROW = Tile(192, 128, pingpong=True)
DH = Tile(64, 256, pingpong=True)
DX = Tile(128, 256, cluster=(1, 2))
DW_UP = Tile(256, 192)


def up(
    x_TD: Float[Tensor, "T D"], w_up_E2ID: Float[Tensor, "E I2 D"], layout: ExpertLayout, save: Save | None
) -> tuple[Tensor, SavedUp]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up."""
    gather, keep = _gathers(x_TD, w_up_E2ID.shape[1] // 2), save is not None
    rows = _rows(x_TD, layout, gather)
    tile = WIDE if gather else UP if keep else UP_ALONE
    a, h = launch_quack.gated_product(rows, w_up_E2ID, layout, tile, gather=gather, keep=keep)
    return a, SavedUp(h, None)


def down(a_SI: Float[Tensor, "S I"], w_down_EDI: Float[Tensor, "E D I"], layout: ExpertLayout) -> Float[Tensor, "S D"]:
    tile = DOWN_NARROW if w_down_EDI.shape[2] <= NARROW_EXPERTS else WIDE
    return launch_quack.product(a_SI, w_down_EDI, layout, tile)


def backward(
    dy_TD: Float[Tensor, "T D"],
    x_TD: Float[Tensor, "T D"],
    weights: BackwardWeights,
    layout: ExpertLayout,
    saved: SavedUp,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [S, D], dw_up [E, 2I, D], dw_down [E, D, I] and dscore [S]."""
    w_up, w_down = weights
    dw_up, dw_down = torch.empty_like(w_up), torch.empty_like(w_down)
    gather = _gathers(x_TD, w_down.shape[2])
    assert saved.h is not None, "backward needs gate and up"
    dys = _rows(dy_TD, layout, gather)
    dh, a, dscore_S = launch_quack.gated_product_gradient(
        dys, w_down, saved.h, layout, WIDE if gather else DH, gather=gather
    )
    launch_quack.weight_gradient(dys, a, layout, dw_down, WIDE, gather=gather)
    del dys, a
    dh = dh.flatten(1)
    xs = _rows(x_TD, layout, gather)
    tile = WIDE if gather else DW_UP
    launch_quack.weight_gradient(xs, dh, layout, dw_up.transpose(1, 2), tile, gather=gather, pairs=True)
    del xs
    dx = launch_quack.product(dh, w_up.transpose(1, 2), layout, DX, pairs=True)
    return dx, dw_up, dw_down, dscore_S


def _gathers(x_TD: Tensor, width: int) -> bool:
    return width <= NARROW_EXPERTS and x_TD.shape[0] > 0


def _rows(x_TD: Tensor, layout: ExpertLayout, gather: bool) -> Tensor:
    """By token, to be gathered as they are loaded, or copied into slot order."""
    return x_TD if gather else launch.spread_rows(x_TD, layout, fp8=False).values_SX
