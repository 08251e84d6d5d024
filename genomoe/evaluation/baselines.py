"""Baselines that a DNA language model has to beat: interpolated Markov models of any order.

An order-k model predicts a base from the k before it. High orders see most contexts once or never, so each
order is mixed with the one below it:

    p_j(b | c) = (n(c b) + a_j p_{j-1}(b | c')) / (n(c) + a_j),    p_{-1} = 1/4

with n the counts over both strands, c' the context without its farthest base and a_j the concentration of
order j: the Dirichlet-prior backoff of MacKay and Peto (1995, "A hierarchical Dirichlet language model").
The concentrations and the order are chosen on a part of the training data that is left out of the counts, so
that neither sees the test. Between related genomes orders of 12 and more matter: such a context occurs by
chance once in 16 million places, and so finds the homologous one.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int8]
"""A sequence as codes: A 0, C 1, G 2, T 3, anything else -1."""
Values = NDArray[np.float64]

UNIFORM_BITS = 2.0
BLOCK = 5_000
"""Bases of one block of the split that chooses order and concentrations."""
HELD_OUT_EVERY = 10
"""One block in so many is held out."""
CONCENTRATIONS = np.geomspace(0.03, 3000.0, 21)
TOLERANCE_BITS = 5e-4
"""A higher order is taken only if the best gains more than this over it."""


def encode(sequence: bytes | str) -> Codes:
    """Codes of a sequence, upper or lower case; U counts as T, ambiguous letters are -1."""
    raw = sequence.encode() if isinstance(sequence, str) else sequence
    return _CODE[np.frombuffer(raw, np.uint8)]


def composition_bits(sequences: Sequence[Codes]) -> list[Values]:
    """-log2 of each base's share among the unambiguous bases of all `sequences`, [length] each; else NaN.

    Their mean is the entropy of the composition: no model that ignores its context does better on them.
    """
    counts = sum((np.bincount(codes[codes >= 0], minlength=4) for codes in sequences), np.zeros(4))
    bits = -np.log2(counts / max(1.0, counts.sum()), where=counts > 0, out=np.zeros(4))
    return [np.where(codes >= 0, bits[codes], np.nan) for codes in sequences]


def reverse_complement(codes: Codes) -> Codes:
    """The other strand."""
    flipped = codes[::-1]
    return np.where(flipped < 0, flipped, 3 - flipped).astype(np.int8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkovModel:
    """An interpolated Markov model: its training sequences, order and concentrations.

    Count tables are made order by order while scoring, so that only one is in memory at a time.
    """

    sequences: tuple[Codes, ...]
    """Training sequences, one strand; both are counted."""
    concentrations: tuple[float, ...]
    """a_0 ... a_k; the order is their number less one."""
    selection_bits: tuple[float, ...]
    """Bits per base of orders 0, 1, ... on the held-out part of the training data, while choosing."""

    @property
    def order(self) -> int:
        """k: how many preceding bases are looked at."""
        return len(self.concentrations) - 1

    @classmethod
    def fit(cls, sequences: Iterable[Codes], *, max_order: int = 16, patience: int = 3) -> "MarkovModel":
        """Choose order (at most `max_order`) and concentrations on held-out blocks; count on everything.

        Orders are tried upwards until `patience` of them in a row bring nothing.

        Raises:
            ValueError: no training base, or a max_order outside 0 .. 30.
        """
        sequences = tuple(sequences)
        if not 0 <= max_order <= 30:
            raise ValueError(f"max_order={max_order} is outside 0 to 30.")
        if not any((codes >= 0).any() for codes in sequences):
            raise ValueError("a Markov model needs at least one unambiguous base to train on.")
        kept, held_out = _split(sequences)
        chosen: list[float] = []
        curve: list[float] = []
        probabilities = [np.full(len(codes), 0.25) for codes in held_out]
        for order in range(max_order + 1):
            hits = _count_hits(kept, held_out, order)
            trials = [
                (_mean_bits(mixed, held_out), concentration, mixed)
                for concentration in CONCENTRATIONS
                for mixed in [_mix(hits, probabilities, concentration)]
            ]
            bits, concentration, probabilities = min(trials, key=lambda trial: trial[0])
            chosen.append(float(concentration))
            curve.append(bits)
            if order >= patience and curve[-patience - 1] - min(curve[-patience:]) < TOLERANCE_BITS:
                break
        best = min(curve)
        order = next(index for index, bits in enumerate(curve) if bits - best < TOLERANCE_BITS)
        return cls(sequences=sequences, concentrations=tuple(chosen[: order + 1]), selection_bits=tuple(curve))

    def truncated(self, order: int) -> "MarkovModel":
        """The same model looking at no more than `order` bases."""
        return dataclasses.replace(self, concentrations=self.concentrations[: order + 1])

    def bits(self, sequences: Sequence[Codes]) -> list[Values]:
        """-log2 p of every base given those before it, [length] each; NaN where the base is ambiguous.

        The first bases of a sequence, and those after an ambiguous one, are predicted from fewer.
        """
        probabilities = [np.full(len(codes), 0.25) for codes in sequences]
        for order, concentration in enumerate(self.concentrations):
            probabilities = _mix(_count_hits(self.sequences, sequences, order), probabilities, concentration)
        return [np.where(codes >= 0, -np.log2(p), np.nan) for p, codes in zip(probabilities, sequences, strict=True)]


_CODE = np.full(256, -1, np.int8)
for _code, _letters in enumerate((b"Aa", b"Cc", b"Gg", b"TtUu")):
    _CODE[list(_letters)] = _code

Hits = list[tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Per sequence: n(c b) and n(c) at every base; both 0 where the context is not whole."""


def _split(sequences: Sequence[Codes]) -> tuple[list[Codes], list[Codes]]:
    kept: list[Codes] = []
    held_out: list[Codes] = []
    number = 0
    for codes in sequences:
        size = max(1, min(BLOCK, len(codes) // HELD_OUT_EVERY))
        for start in range(0, len(codes), size):
            (held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 else kept).append(codes[start : start + size])
            number += 1
    return kept, held_out


def _words(codes: Codes, length: int) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """The word of `length` bases ending at every base, as a number, and where it is whole and unambiguous."""
    words = np.zeros(len(codes), np.uint64)
    place = np.arange(len(codes))
    run = place - np.maximum.accumulate(np.where(codes < 0, place, -1))
    letters = np.maximum(codes, 0).astype(np.uint64)
    for back in range(min(length, len(codes))):
        words[back:] |= letters[: len(codes) - back] << np.uint64(2 * back)
    return words, run >= length


def _count_hits(training: Sequence[Codes], sequences: Sequence[Codes], order: int) -> Hits:
    words = []
    for strand in training:
        for codes in (strand, reverse_complement(strand)):
            word, whole = _words(codes, order + 1)
            words.append(word[whole])
    table, counts = np.unique(np.concatenate(words), return_counts=True)
    # Words that share a context lie side by side, so that a context's count is a difference of running sums.
    running = np.concatenate([[0], np.cumsum(counts)])
    hits: Hits = []
    for codes in sequences:
        word, whole = _words(codes, order + 1)
        first = word & ~np.uint64(3)
        low, high = np.searchsorted(table, first), np.searchsorted(table, first + np.uint64(3), side="right")
        at, after = np.searchsorted(table, word), np.searchsorted(table, word, side="right")
        hits.append(
            (
                np.where(whole, running[after] - running[at], 0).astype(np.float32),
                np.where(whole, running[high] - running[low], 0).astype(np.float32),
            )
        )
    return hits


def _mix(hits: Hits, lower: list[Values], concentration: float) -> list[Values]:
    return [
        (word + concentration * p) / (context + concentration) for (word, context), p in zip(hits, lower, strict=True)
    ]


def _mean_bits(probabilities: list[Values], sequences: Sequence[Codes]) -> float:
    scored = [p[codes >= 0] for p, codes in zip(probabilities, sequences, strict=True)]
    return float(-np.log2(np.concatenate(scored)).mean())
