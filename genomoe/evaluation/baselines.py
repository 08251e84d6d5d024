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
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int8]
"""A sequence as codes: A 0, C 1, G 2, T 3, anything else -1."""
Values = NDArray[np.float64]

UNIFORM_BITS = 2.0
BITS = 3
"""Bits of a base in a word."""
MAX_ORDER = 20
"""Highest order of a Markov model: a word of 21 bases fills a 64-bit number."""
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


def composition(sequences: Iterable[Codes]) -> Callable[[Codes], Values]:
    """What gives -log2 of each base's share among the unambiguous bases of all `sequences`; NaN for any other.

    Its mean over them is the entropy of the composition: no model that ignores its context does better on them.
    """
    counts = np.zeros(4)
    for codes in sequences:
        counts += [np.count_nonzero(codes == base) for base in range(4)]
    bits = -np.log2(counts / max(1.0, counts.sum()), where=counts > 0, out=np.zeros(4))
    by_code = np.append(bits, np.nan)  # -1 is the last
    return lambda codes: by_code[codes]


def reverse_complement(codes: Codes) -> Codes:
    """The other strand."""
    flipped = codes[::-1]
    return np.where(flipped < 0, flipped, 3 - flipped).astype(np.int8)


class Counts(NamedTuple):
    """How often any word of at most MAX_ORDER + 1 bases occurs on both strands of some sequences.

    A word is a number that holds its last base in the three highest bits (A 1, C 2, G 3, T 4), then the one before
    it, and so on; 0 where there is none. Words that end alike so lie side by side once sorted, whatever their length.
    """

    words: NDArray[np.uint64]
    """The word that ends at each unambiguous base, sorted."""
    contexts: NDArray[np.uint64]
    """The same without their last base, sorted."""

    @classmethod
    def of(cls, sequences: Iterable[Codes]) -> "Counts":
        """Count both strands of `sequences`."""
        strands = (strand for codes in sequences for strand in (codes, reverse_complement(codes)))
        words = np.concatenate([words_of(strand)[strand >= 0] for strand in strands])
        contexts = words << np.uint64(BITS)
        words.sort()
        contexts.sort()
        return cls(words, contexts)

    def at(self, words: NDArray[np.uint64], order: int) -> "Hits":
        """n(c b) and n(c) at every word, c of `order` bases; both 0 where the context is not whole."""
        whole = words >> np.uint64(64 - BITS * (order + 1)) & np.uint64(7) > 0
        of_word = np.where(whole, _alike(self.words, words, order + 1), 0)
        of_context = np.where(whole, _alike(self.contexts, words << np.uint64(BITS), order), 0)
        return of_word.astype(np.float32), of_context.astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkovModel:
    """An interpolated Markov model: what it counted, its order and concentrations."""

    counts: Counts
    """Of the training sequences."""
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
            ValueError: no training base, or a max_order outside 0 .. MAX_ORDER.
        """
        sequences = tuple(sequences)
        if not 0 <= max_order <= MAX_ORDER:
            raise ValueError(f"max_order={max_order} is outside 0 to {MAX_ORDER}.")
        if not any((codes >= 0).any() for codes in sequences):
            raise ValueError("a Markov model needs at least one unambiguous base to train on.")
        kept, held_out = _split(sequences)
        counts = Counts.of(kept)
        words = np.concatenate([words_of(codes)[codes >= 0] for codes in held_out])
        chosen: list[float] = []
        curve: list[float] = []
        probabilities = np.full(len(words), 0.25)
        for order in range(max_order + 1):
            hits = counts.at(words, order)
            trials = [
                (float(-np.log2(mixed).mean()), concentration, mixed)
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
        del counts, words, hits, trials  # before more is counted
        return cls(counts=Counts.of(sequences), concentrations=tuple(chosen[: order + 1]), selection_bits=tuple(curve))

    def bits(self, codes: Codes) -> list[Values]:
        """-log2 p of every base of a sequence given those before it, [length]; NaN where the base is ambiguous.

        One array an order: element j is this model looking at no more than j bases, and the last is the model itself.
        The first bases, and those after an ambiguous one, are predicted from fewer.
        """
        words, by_order = words_of(codes), []
        probabilities = np.full(len(codes), 0.25)
        for order, concentration in enumerate(self.concentrations):
            probabilities = _mix(self.counts.at(words, order), probabilities, concentration)
            by_order.append(np.where(codes >= 0, -np.log2(probabilities), np.nan))
        return by_order


_CODE = np.full(256, -1, np.int8)
for _code, _letters in enumerate((b"Aa", b"Cc", b"Gg", b"TtUu")):
    _CODE[list(_letters)] = _code

Hits = tuple[NDArray[np.float32], NDArray[np.float32]]


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


def words_of(codes: Codes) -> NDArray[np.uint64]:
    """The word that ends at every base, up to the nearest ambiguous one; 0 at those themselves."""
    words = np.zeros(len(codes), np.uint64)
    letters = (codes + 1).astype(np.uint64)
    for back in range(min(MAX_ORDER + 1, len(codes))):
        words[back:] |= letters[: len(codes) - back] << np.uint64(64 - BITS * (back + 1))
    place = np.arange(len(codes))
    run = place - np.maximum.accumulate(np.where(codes < 0, place, -1))
    known = BITS * np.minimum(run, MAX_ORDER + 1).astype(np.uint64)
    return words & ~(np.uint64(2**64 - 1) >> known)


def _alike(table: NDArray[np.uint64], words: NDArray[np.uint64], bases: int) -> NDArray[np.int64]:
    """How many of the sorted `table` begin with the same `bases` bases as each word."""
    rest = np.uint64((1 << 64 - BITS * bases) - 1)
    order = np.argsort(words)  # neighbours are found in the same part of the table, which so stays in the cache
    near, found = words[order], np.empty(len(words), np.int64)
    found[order] = np.searchsorted(table, near | rest, side="right") - np.searchsorted(table, near & ~rest)
    return found


def _mix(hits: Hits, lower: Values, concentration: float) -> Values:
    word, context = hits
    return (word + concentration * lower) / (context + concentration)
