"""Tensors that know how to be made again, so that an activation policy can drop them after the forward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_ATTRIBUTE = "_genomoe_recipe"


def set_recipe(tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Attach a function that computes the tensor again, bit by bit, from what is kept anyway."""
    setattr(tensor, _ATTRIBUTE, make)
    return tensor


def get_recipe(tensor: Tensor) -> Callable[[], Tensor] | None:
    """The function attached by `set_recipe`, or None."""
    return getattr(tensor, _ATTRIBUTE, None)
