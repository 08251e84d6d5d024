"""Bits per base from -log2 probabilities: the one place that decides which bases count."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


class BitsPerBase(NamedTuple):
    """Mean -log2 p over a set of bases; 2.0 is what a uniform guess gets, less is better."""

    bits_per_base: float
    """Every unambiguous base counts 1."""
    bits_per_base_weighted: float
    """Soft-masked (lower-case) bases count less, as the weights say."""
    bases: int
    """How many bases were scored."""


def scored(bits: Sequence[Values], weights: Sequence[Values]) -> list[NDArray[np.bool_]]:
    """Where a base has both a score (finite bits) and a weight above 0, one mask a sequence."""
    return [np.isfinite(b) & (w > 0) for b, w in zip(bits, weights, strict=True)]


def bits_per_base(
    bits: Sequence[Values], weights: Sequence[Values], masks: Sequence[NDArray[np.bool_]] | None = None
) -> BitsPerBase:
    """Mean bits over the bases in `masks` (default: all scored ones), so that models share the same bases.

    Raises:
        ValueError: no base to score, or a base in `masks` without a finite score.
    """
    masks = scored(bits, weights) if masks is None else masks
    chosen = np.concatenate([b[m] for b, m in zip(bits, masks, strict=True)])
    weight = np.concatenate([w[m] for w, m in zip(weights, masks, strict=True)])
    if not len(chosen) or not weight.sum() > 0:
        raise ValueError("there is no base to score: every one is ambiguous or the sequences are empty.")
    if not np.isfinite(chosen).all():
        raise ValueError("a base that another model scored has no finite score here.")
    return BitsPerBase(float(chosen.mean()), float((chosen * weight).sum() / weight.sum()), len(chosen))
