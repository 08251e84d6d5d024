"""A corpus: contigs of one or more sources laid end to end, and the bases of any span of them.

**Global coordinates.** Contig c occupies [offset_c, offset_c + length_c) of one long axis; everything that
samples, shuffles or caches works on that axis. A *segment* is a stretch of it that windows may be cut from:
windows never leave their segment, so never cross a contig's end.

**Case.** In the letters a corpus gives, lower case means soft-masked and nothing else: where a source's case
carries no masking (all of it lower-case, or soft_mask: false) its letters come upper-case.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

UNMASKED_CASE = 0.9
"""A source of which more than this part is lower-case carries no soft-masking: its case is then ignored."""
CASE_SAMPLE = 1 << 22
"""Bases at the start of a source that decide it."""
LOWER = 0x20
"""The bit that tells lower-case from upper-case ASCII letters."""


class SourceInfo(NamedTuple):
    """What is known of one source, that is of one named set of files."""

    name: str
    weight: float
    soft_masked: bool
    """Whether any of its bases count as soft-masked."""
    tags: Mapping[str, str]
    split: str | None = None


class ContigTable(NamedTuple):
    """One row per contig, in the order of the global axis."""

    names: list[str]
    lengths: np.ndarray
    """[contigs] int64."""
    offsets: np.ndarray
    """[contigs] int64, start on the global axis."""
    sources: np.ndarray
    """[contigs] int32, row of Corpus.sources."""


class Segments(NamedTuple):
    """Stretches of the global axis that windows may be cut from, sorted, disjoint."""

    starts: np.ndarray
    """[segments] int64."""
    ends: np.ndarray
    """[segments] int64."""
    sources: np.ndarray
    """[segments] int32, row of Corpus.sources."""

    @property
    def bases(self) -> int:
        """Bases in all segments."""
        return int((self.ends - self.starts).sum())

    def take(self, rows: np.ndarray) -> Segments:
        """Some of the segments."""
        return Segments(self.starts[rows], self.ends[rows], self.sources[rows])


class Corpus(Protocol):
    """What datasets need; FastaCorpus and ZarrCorpus provide it, and give the same bases."""

    sources: tuple[SourceInfo, ...]
    contigs: ContigTable
    segments: Segments

    def read(self, start: int, end: int) -> np.ndarray:
        """Letters [start, end) of the global axis as uint8; lower case is soft-masked."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each source file, by its path: what must not change between a run and its resumption."""
        ...


def restricted(corpus: Corpus, segments: Segments) -> Corpus:
    """The same corpus with windows cut from these segments only (a shallow copy: nothing is read again)."""
    view = copy.copy(corpus)
    view.segments = segments
    return view


def locate(contigs: ContigTable, positions: np.ndarray) -> np.ndarray:
    """Row of the contig that holds each global position."""
    return np.searchsorted(contigs.offsets, positions, side="right") - 1


def contig_table(
    names: list[str], lengths: Sequence[int] | np.ndarray, sources: Sequence[int] | np.ndarray
) -> ContigTable:
    """Lay contigs end to end."""
    sizes = np.asarray(lengths, dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    return ContigTable(names, sizes, offsets, np.asarray(sources, dtype=np.int32))


def is_masking(lower: int, total: int) -> bool:
    """Whether `lower` lower-case bases of `total` are soft-masking rather than a way of writing."""
    return 0 < lower <= UNMASKED_CASE * total


def apply_mask(letters: np.ndarray, start: int, runs: np.ndarray) -> None:
    """Lower-case, in place, the letters of [start, start + len) that lie in `runs`.

    Args:
        letters: uint8 [n], upper-case.
        start: global position of the first letter.
        runs: int64 [r, 2] starts and ends on the global axis, sorted and disjoint.
    """
    end = start + len(letters)
    first = int(np.searchsorted(runs[:, 1], start, side="right"))
    last = int(np.searchsorted(runs[:, 0], end, side="left"))
    if first >= last:
        return
    edges = np.clip(runs[first:last].reshape(-1) - start, 0, len(letters))
    gaps = np.diff(edges, prepend=0, append=len(letters))
    bits = np.zeros(len(gaps), dtype=np.uint8)
    bits[1::2] = LOWER
    letters |= np.repeat(bits, gaps)


def apply_letters(letters: np.ndarray, start: int, runs: np.ndarray) -> None:
    """Overwrite, in place, the letters of [start, start + len) that lie in `runs`.

    Args:
        letters: uint8 [n].
        start: global position of the first letter.
        runs: int64 [r, 3] start, end and letter, sorted and disjoint.
    """
    end = start + len(letters)
    first = int(np.searchsorted(runs[:, 1], start, side="right"))
    last = int(np.searchsorted(runs[:, 0], end, side="left"))
    if last - first < 64:
        for low, high, letter in runs[first:last].tolist():
            letters[max(low - start, 0) : high - start] = letter
        return
    edges = np.clip(runs[first:last, :2].reshape(-1) - start, 0, len(letters))
    values = np.zeros(len(edges) + 1, dtype=np.uint8)
    values[1::2] = runs[first:last, 2]
    written = np.repeat(values, np.diff(edges, prepend=0, append=len(letters)))
    np.copyto(letters, written, where=written > 0)


def letter_runs(letters: np.ndarray, start: int) -> np.ndarray:
    """int64 [r, 3] start, end and letter of the maximal runs of one letter that isn't A, C, G or T."""
    other = letters[~_IS_BASE[letters]]
    if not other.size:
        return np.empty((0, 3), dtype=np.int64)
    places = np.flatnonzero(~_IS_BASE[letters])
    first = np.concatenate([[True], (np.diff(places) > 1) | (other[1:] != other[:-1])])
    last = np.concatenate([first[1:], [True]])
    return np.stack([places[first] + start, places[last] + start + 1, other[first]], axis=1).astype(np.int64)


_IS_BASE = np.zeros(256, dtype=bool)
_IS_BASE[list(b"ACGT")] = True


def lower_case_runs(letters: np.ndarray, start: int) -> np.ndarray:
    """int64 [r, 2] maximal runs of lower-case letters, as positions counted from `start`."""
    lower = np.concatenate([[0], (letters >> 5) & 1, [0]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(lower))
    return edges.reshape(-1, 2).astype(np.int64) + start


def join_runs(pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Sorted runs from several pieces in order, those that touch joined."""
    runs = np.concatenate([np.empty((0, 2), dtype=np.int64), *pieces])
    if len(runs) < 2:
        return runs
    split = runs[1:, 0] > runs[:-1, 1]
    first = np.concatenate([[True], split])
    last = np.concatenate([split, [True]])
    return np.stack([runs[first, 0], runs[last, 1]], axis=1)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
