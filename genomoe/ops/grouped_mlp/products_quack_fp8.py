"""The fused path with e4m3 products, QuACK's where that pays.

As `products_fp8`, but for two things: where gate and up are not kept (inference; training that recomputes them), SwiGLU
is in the product's epilogue and a pass scales the rows, which is less to write and read than gate and up; and the down
projection of forward is QuACK's. Its other e4m3 products are no faster than Triton's at the power limit of an H200.

Axes: T tokens, S slots, D model, I expert width, E experts.
"""

from __future__ import annotations

from jaxtyping import Float, Float32
from torch import Tensor

from . import launch, launch_quack, products_fp8
from .launch import ScaledRows
from .launch_quack import Tile
from .layout import ExpertLayout
from .products_fp8 import E4M3Weight, backward, measure, prepare, prepare_backward
from .saved import Save, SavedUp

__all__ = ["backward", "down", "measure", "prepare", "prepare_backward", "up"]

UP_ALONE = Tile(128, 192, pingpong=True)
DOWN = Tile(128, 256)


def up(
    x_TD: Float[Tensor, "T D"], w_up: E4M3Weight, layout: ExpertLayout, save: Save | None
) -> tuple[ScaledRows, SavedUp]:
    """a = silu(gate) up score in slot order, and what backward needs of gate and up."""
    if save is not None:
        return products_fp8.up(x_TD, w_up, layout, save)
    xs = launch.spread_rows(x_TD, layout, fp8=True)
    unit_S = _unit(xs, w_up, layout)
    a_SI, _ = launch_quack.gated_product(
        xs.values_SX, w_up.values_ENK, layout, UP_ALONE, row_scale_S=unit_S, keep=False
    )
    return launch.scale_rows(a_SI, layout), SavedUp(None, None)


def down(a: ScaledRows, w_down: E4M3Weight, layout: ExpertLayout) -> Float[Tensor, "S D"]:
    return launch_quack.scaled_product(a.values_SX, _unit(a, w_down, layout), w_down.values_ENK, layout, DOWN)


def _unit(rows: ScaledRows, w: E4M3Weight, layout: ExpertLayout) -> Float32[Tensor, " S"]:
    """What a unit of each row of the product is worth."""
    return layout.by_slot(w.scale_E) * rows.scale_S
