"""Training, validation and test stretches of a corpus, and a check that they don't hold the same sequence.

Splits are made of whole contigs: by the corpus description, by source, by contig name, or by cluster, where contigs
that share k-mers stay together so that no close relative of a training contig is held out.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from genomoe.data.corpus import Corpus, Segments, locate
from genomoe.data.description import SPLITS
from genomoe.data.sampling import uniform
from genomoe.data.sketch import SCALE, K, identity, sketch
from genomoe.genome.errors import GenoMoEError

SplitBy = Literal["description", "source", "contig", "cluster"]


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """How a corpus is divided."""

    by: SplitBy = "description"
    """'description': each source's own `split`; 'source' and 'contig': names that match valid and test;
    'cluster': clusters of contigs with shared k-mers, dealt out by the fractions."""
    valid: tuple[str, ...] = ()
    """Name patterns of validation sources, or contigs ('name' or 'source/name')."""
    test: tuple[str, ...] = ()
    """The same for test."""
    valid_fraction: float = 0.05
    """Part of the bases for validation when splitting by cluster."""
    test_fraction: float = 0.0
    """Part of the bases for test when splitting by cluster."""
    similarity: float = 0.1
    """Contigs that share at least this part of the smaller one's k-mers are one cluster (0.1 of 21-mers is about
    90 % identity over all of it, or 10 % of it copied exactly)."""
    seed: int = 0
    """Which clusters are held out."""

    def __post_init__(self) -> None:
        if self.by not in ("description", "source", "contig", "cluster"):
            raise GenoMoEError(f"split.by must be description, source, contig or cluster, got {self.by!r}.")
        for name in ("valid_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise GenoMoEError(f"split.{name} must lie in [0, 1), got {getattr(self, name)}.")
        if not 0 < self.similarity <= 1:
            raise GenoMoEError(f"split.similarity must lie in (0, 1], got {self.similarity}.")


def split_segments(corpus: Corpus, config: SplitConfig) -> dict[str, Segments]:
    """The segments of 'train', 'valid' and 'test'; every segment of the corpus is in exactly one.

    Raises GenoMoEError when a pattern matches nothing or nothing is left to train on.
    """
    assigned = _assign(corpus, config)
    rows = locate(corpus.contigs, corpus.segments.starts)
    split = {name: corpus.segments.take(np.flatnonzero(assigned[rows] == number)) for number, name in enumerate(SPLITS)}
    if not len(split["train"].starts):
        raise GenoMoEError("The split leaves no contig to train on; hold out less.")
    return split


def _assign(corpus: Corpus, config: SplitConfig) -> np.ndarray:
    """Split number of every contig."""
    contigs = corpus.contigs
    if config.by == "cluster":
        return _by_cluster(corpus, config)
    if config.by == "description":
        of_source = np.array([SPLITS.index(source.split or "train") for source in corpus.sources])
        return of_source[contigs.sources]
    source_names = [source.name for source in corpus.sources]
    assigned = np.zeros(len(contigs.names), dtype=np.int64)
    for number, patterns in ((1, config.valid), (2, config.test)):
        for pattern in patterns:
            if config.by == "source":
                chosen = np.array([fnmatch.fnmatchcase(name, pattern) for name in source_names])[contigs.sources]
            else:
                chosen = np.array(
                    [
                        fnmatch.fnmatchcase(name, pattern)
                        or fnmatch.fnmatchcase(f"{source_names[source]}/{name}", pattern)
                        for name, source in zip(contigs.names, contigs.sources, strict=True)
                    ]
                )
            if not chosen.any():
                known = source_names if config.by == "source" else contigs.names
                raise GenoMoEError(
                    f"split: no {config.by} matches {pattern!r}; there are {', '.join(known[:8])}"
                    + (", ..." if len(known) > 8 else ".")
                )
            if (assigned[chosen] > 0).any():
                raise GenoMoEError(f"split: {pattern!r} matches a {config.by} that is held out already.")
            assigned[chosen] = number
    return assigned


def cluster_contigs(corpus: Corpus, similarity: float, *, k: int = K, scale: int = 64) -> np.ndarray:
    """Cluster number of every contig: contigs joined, directly or through others, by shared k-mers."""
    contigs = corpus.contigs
    hashes, owners = [], []
    for row, (offset, length) in enumerate(zip(contigs.offsets.tolist(), contigs.lengths.tolist(), strict=True)):
        found = np.unique(_sketch_span(corpus, offset, offset + length, k, scale)[0])
        hashes.append(found)
        owners.append(np.full(len(found), row))
    sizes = np.array([len(found) for found in hashes])
    pairs = _shared_counts(np.concatenate(hashes), np.concatenate(owners), len(sizes))
    parent = np.arange(len(sizes))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = int(parent[row])
        return row

    for (one, other), shared in pairs.items():
        if shared >= similarity * min(sizes[one], sizes[other]):
            parent[root(one)] = root(other)
    return np.array([root(row) for row in range(len(sizes))])


def _shared_counts(hashes: np.ndarray, owners: np.ndarray, contigs: int) -> dict[tuple[int, int], int]:
    """How many hashes each pair of contigs shares; a hash in over 64 contigs is a repeat and is left out."""
    order = np.argsort(hashes, kind="stable")
    hashes, owners = hashes[order], owners[order]
    first = np.concatenate([[True], hashes[1:] != hashes[:-1]]) if len(hashes) else np.empty(0, dtype=bool)
    starts = np.flatnonzero(first)
    counts = np.diff(np.append(starts, len(hashes)))
    keys = []
    for size in np.unique(counts[(counts > 1) & (counts <= 64)]):
        members = owners[starts[counts == size][:, None] + np.arange(size)]
        one, other = np.triu_indices(int(size), 1)
        keys.append((members[:, one].astype(np.int64) * contigs + members[:, other]).reshape(-1))
    if not keys:
        return {}
    pairs, shared = np.unique(np.concatenate(keys), return_counts=True)
    return {(int(p // contigs), int(p % contigs)): int(n) for p, n in zip(pairs, shared, strict=True)}


def _by_cluster(corpus: Corpus, config: SplitConfig) -> np.ndarray:
    clusters = cluster_contigs(corpus, config.similarity)
    names, numbers = np.unique(clusters, return_inverse=True)
    bases = np.bincount(numbers, weights=corpus.contigs.lengths)
    total = bases.sum()
    assigned = np.zeros(len(names), dtype=np.int64)
    room = {1: config.valid_fraction * total, 2: config.test_fraction * total}
    for cluster in np.argsort(uniform((config.seed, 0x5B117), names)):
        for number in (1, 2):
            if not assigned[cluster] and bases[cluster] <= room[number]:
                assigned[cluster] = number
                room[number] -= bases[cluster]
    for number, wanted in ((1, config.valid_fraction), (2, config.test_fraction)):
        if wanted and not (assigned == number).any():
            raise GenoMoEError(
                f"split: no cluster is small enough for the {SPLITS[number]} fraction {wanted}; the smallest of "
                f"{len(names)} clusters holds {bases.min() / total:.1%} of the bases. Raise the fraction or the "
                "similarity, or split by contig."
            )
    return assigned[numbers]


def _sketch_span(corpus: Corpus, start: int, end: int, k: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes and global places of a span, read a few megabases at a time."""
    hashes, places = [], []
    step = 1 << 22
    for low in range(start, max(end - k + 1, start), step):
        found = sketch(corpus.read(low, min(low + step + k - 1, end)), k=k, scale=scale)
        hashes.append(found.hashes)
        places.append(found.places + low)
    if not hashes:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    return np.concatenate(hashes), np.concatenate(places)


def find_leaks(
    train: Corpus,
    held_out: Corpus,
    *,
    window: int = 1000,
    threshold: float = 0.5,
    k: int = K,
    scale: int = SCALE,
) -> pd.DataFrame:
    """Held-out windows that are nearly the same as some training sequence, on either strand.

    Returns one row per window of which at least `threshold` of the sampled k-mers occur in training, with columns
    source, contig, start, end (0-based, half-open), shared (part of the k-mers), identity (estimated), and the
    training place train_source, train_contig, train_position that most of those k-mers come from (to a window).
    """
    if window < 4 * scale + k:
        raise GenoMoEError(f"A window of {window} bases is too short to sample; use at least {4 * scale + k}.")
    hashes, places = _sketch_segments(train, k, scale)
    order = np.argsort(hashes, kind="stable")
    hashes, places = hashes[order], places[order]
    rows: list[dict[str, object]] = []
    for start, end in _spans(held_out):
        found, at = _sketch_span(held_out, start, end, k, scale)
        if not len(found) or not len(hashes):
            continue
        slot = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
        hit = hashes[slot] == found
        number = (at - start) // window
        total = np.bincount(number)
        shared = np.bincount(number, weights=hit) / np.maximum(total, 1)
        for leak in np.flatnonzero((shared >= threshold) & (total >= 4)):
            best = places[slot[hit & (number == leak)]]
            cells, votes = np.unique(best // window, return_counts=True)
            low = start + int(leak) * window
            rows.append(
                {
                    **_place(held_out, low, min(low + window, end)),
                    "shared": float(shared[leak]),
                    "identity": float(identity(shared[leak], k)),
                    **_origin(train, int(best[best // window == cells[votes.argmax()]].min())),
                }
            )
    columns = ["source", "contig", "start", "end", "shared", "identity"]
    return pd.DataFrame(rows, columns=[*columns, "train_source", "train_contig", "train_position"])


def repeated_contigs(train: Corpus, held_out: Corpus) -> list[tuple[str, str]]:
    """Contigs of which a held-out stretch is in training letter for letter: (held-out, training), "source/contig".

    Only stretches of equal length are read; `find_leaks` finds near copies and parts.
    """
    sizes = [part.segments.ends - part.segments.starts for part in (train, held_out)]
    known: dict[tuple[int, bytes], int] = {}
    for row in np.flatnonzero(np.isin(sizes[0], sizes[1])).tolist():
        known.setdefault((int(sizes[0][row]), _digest(train, row)), row)
    found = []
    for row in np.flatnonzero(np.isin(sizes[1], sizes[0])).tolist():
        match = known.get((int(sizes[1][row]), _digest(held_out, row)))
        if match is not None:
            found.append((_contig_name(held_out, row), _contig_name(train, match)))
    return found


def _digest(corpus: Corpus, row: int) -> bytes:
    """Hash of a segment's letters, case aside."""
    digest = hashlib.blake2b(digest_size=16)
    start, end = int(corpus.segments.starts[row]), int(corpus.segments.ends[row])
    for low in range(start, end, 1 << 22):
        digest.update(corpus.read(low, min(low + (1 << 22), end)).tobytes().upper())
    return digest.digest()


def _contig_name(corpus: Corpus, row: int) -> str:
    start = int(corpus.segments.starts[row])
    place = _place(corpus, start, start)
    return f"{place['source']}/{place['contig']}"


def _spans(corpus: Corpus) -> list[tuple[int, int]]:
    return list(zip(corpus.segments.starts.tolist(), corpus.segments.ends.tolist(), strict=True))


def _sketch_segments(corpus: Corpus, k: int, scale: int) -> tuple[np.ndarray, np.ndarray]:
    parts: Sequence[tuple[np.ndarray, np.ndarray]] = [
        _sketch_span(corpus, start, end, k, scale) for start, end in _spans(corpus)
    ]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _place(corpus: Corpus, start: int, end: int) -> dict[str, object]:
    row = int(locate(corpus.contigs, np.asarray(start)))
    offset = int(corpus.contigs.offsets[row])
    source = corpus.sources[int(corpus.contigs.sources[row])].name
    return {
        "source": source,
        "contig": corpus.contigs.names[row],
        "start": start - offset,
        "end": end - offset,
    }


def _origin(corpus: Corpus, position: int) -> dict[str, object]:
    place = _place(corpus, position, position)
    return {
        "train_source": place["source"],
        "train_contig": place["contig"],
        "train_position": place["start"],
    }
