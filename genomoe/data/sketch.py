"""k-mer sketches: how much of one sequence occurs in another, whichever strand, without aligning them.

A k-mer is taken as the smaller of its own code and its reverse complement's (canonical), hashed, and kept when the
hash falls below 2^64 / scale (FracMinHash: Irber et al. 2022; the same k-mers are kept in every sequence, so shared
content is estimated from shared hashes). Two sequences of identity i share about i^k of their k-mers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from genomoe.data.sampling import mix64

K = 21
SCALE = 16

_CODE = np.full(256, 255, dtype=np.uint8)
for _code, _letters in enumerate((b"Aa", b"Cc", b"Gg", b"TtUu")):
    _CODE[list(_letters)] = _code


class Sketch(NamedTuple):
    """The kept k-mers of a sequence, in order of their places."""

    hashes: np.ndarray
    """uint64 [n]."""
    places: np.ndarray
    """int64 [n], first base of each k-mer."""


def canonical_kmers(letters: np.ndarray, k: int = K) -> tuple[np.ndarray, np.ndarray]:
    """uint64 canonical codes [len - k + 1] of every k-mer (k <= 31), and whether it holds only A, C, G and T."""
    count = len(letters) - k + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=bool)
    codes = _CODE[letters]
    bad = np.concatenate([[0], np.cumsum(codes > 3)])
    valid = bad[k:] == bad[:-k]
    codes = (codes & 3).astype(np.uint64)
    forward = _windows(codes, k)
    backward = _windows((np.uint64(3) - codes)[::-1], k)[::-1]
    return np.minimum(forward, backward), valid


def _windows(codes: np.ndarray, k: int) -> np.ndarray:
    """Base-4 value of every k-long window, first base heaviest, by doubling: about 2 log2(k) passes."""
    count = len(codes) - k + 1
    value: np.ndarray | None = None
    done = 0
    power, width = codes, 1
    while True:
        if k & width:
            part = power[done : done + count]
            value = part if value is None else (value << np.uint64(2 * width)) | part
            done += width
        if done == k:
            assert value is not None
            return value
        power = (power[: len(power) - width] << np.uint64(2 * width)) | power[width:]
        width *= 2


def sketch(letters: np.ndarray, *, k: int = K, scale: int = SCALE) -> Sketch:
    """The sketch of a sequence (uint8 letters, any case)."""
    kmers, valid = canonical_kmers(letters, k)
    hashes = mix64(kmers)
    kept = np.flatnonzero(valid & (hashes < np.uint64((1 << 64) // scale if scale > 1 else (1 << 64) - 1)))
    return Sketch(hashes[kept], kept)


def containment(one: np.ndarray, other: np.ndarray) -> float:
    """Part of the smaller set of hashes that the other one holds, in [0, 1]; 0 where either is empty."""
    small, large = sorted((np.unique(one), np.unique(other)), key=len)
    if not len(small):
        return 0.0
    return float(np.isin(small, large, assume_unique=True).mean())


def identity(shared: float | np.ndarray, k: int = K) -> float | np.ndarray:
    """Estimated identity of sequences that share this part of their k-mers."""
    return shared ** (1.0 / k)
