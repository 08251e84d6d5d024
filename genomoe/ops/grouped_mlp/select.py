"""Which expert backend runs where, and why not the others.

A backend is a function `(x_TD, w_up_E2ID, w_down_EDI, expert_index_TK, scores_TK) -> y_TD` in `PLAIN`, for which
`grouped_mlp` itself adds chunks and recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from genomoe.ops.grouped_mlp import grouped_mm
from genomoe.ops.grouped_mlp.grouped_mm import grouped_mlp_grouped_mm
from genomoe.ops.grouped_mlp.reference import grouped_mlp_reference

PLAIN: dict[str, Callable[..., Tensor]] = {
    "reference": grouped_mlp_reference,
    "grouped_mm": grouped_mlp_grouped_mm,
}


class Choice(NamedTuple):
    """A backend's name and the reason it was taken."""

    name: str
    reason: str


def select_backend(x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str) -> Choice:
    """The backend that `auto` means for these tensors."""
    if precision != "bf16" or save == "mxfp8":
        raise ValueError(f"no expert backend here offers precision={precision!r} with save={save!r}")
    if x_TD.device.type == "cpu":
        return Choice("reference", "on the CPU the loop over experts is as fast as grouped products")
    why_not = grouped_mm.unsupported(x_TD, w_up_E2ID)
    if why_not:
        return Choice("reference", why_not)
    return Choice("grouped_mm", f"grouped products of torch {torch.__version__}")
