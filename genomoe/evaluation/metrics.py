"""Bits per base from -log2 probabilities: the one place that decides which bases count."""

import dataclasses
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


def scored(bits: Values, weights: Values) -> NDArray[np.bool_]:
    """Where a base has both a score (finite bits) and a weight above 0."""
    return np.isfinite(bits) & (weights > 0)


@dataclasses.dataclass
class BitsSum:
    """What is kept of the bases scored so far, however many: their sums."""

    bits: float = 0.0
    weighted_bits: float = 0.0
    weights: float = 0.0
    bases: int = 0

    def add(self, bits: Values, weights: Values, mask: NDArray[np.bool_]) -> None:
        """Count the bases in `mask`, all three [bases], which is the same for all models that are compared.

        Raises:
            ValueError: a base in `mask` without a finite score.
        """
        chosen, weight = bits[mask], weights[mask]
        if not np.isfinite(chosen).all():
            raise ValueError("a base that another model scored has no finite score here.")
        self.bits += float(chosen.sum())
        self.weighted_bits += float(chosen @ weight)
        self.weights += float(weight.sum())
        self.bases += len(chosen)

    def mean(self) -> BitsPerBase:
        """Mean bits over all bases counted.

        Raises:
            ValueError: none was.
        """
        if not self.weights > 0:
            raise ValueError("there is no base to score: every one is ambiguous or the sequences are empty.")
        return BitsPerBase(self.bits / self.bases, self.weighted_bits / self.weights, self.bases)
