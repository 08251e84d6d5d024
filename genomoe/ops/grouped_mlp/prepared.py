"""Weights made ready for the products: anew in every call, or once for all calls of a scope that changes none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

_kept: ContextVar[dict[Any, tuple[Tensor, Any]] | None] = ContextVar("prepared weights", default=None)


@contextlib.contextmanager
def weights_prepared_once() -> Iterator[None]:
    """Within, nothing changes a weight, so that each is measured and quantised at its first use only."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def prepared(make: Callable[..., Any], weight: Tensor, *more: Any) -> Any:
    """make(weight, *more), or what it gave before in this scope."""
    kept, key = _kept.get(), (make, id(weight))
    if kept is None or not isinstance(weight, nn.Parameter):  # a copy that every call makes anew is not kept
        return make(weight, *more)
    if key not in kept:
        kept[key] = weight, make(weight, *more)  # the weight too, so that no other comes to have its id
    return kept[key][1]
