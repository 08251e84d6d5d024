"""Which contigs and regions of a source are used: the filters of a corpus description, applied to a contig table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from genomoe.data.corpus import ContigTable, Segments, join_runs
from genomoe.data.description import Regions, SourceDescription, read_regions
from genomoe.genome.errors import GenoMoEError


class FoundContig(NamedTuple):
    """A contig of a source file, before it is decided whether it is used."""

    name: str
    length: int
    unknown: int
    """Letters N in it; -1 where they were not counted."""
    file: Path


def require_unique(source: SourceDescription, contigs: Sequence[FoundContig]) -> None:
    """Raises GenoMoEError when two files of one source define the same contig."""
    seen: dict[str, Path] = {}
    for contig in contigs:
        if contig.name in seen:
            raise GenoMoEError(
                f"The contig {contig.name!r} of source {source.name!r} is defined by both {seen[contig.name]} and "
                f"{contig.file}; drop one of the files or put them in two sources."
            )
        seen[contig.name] = contig.file


def chosen(source: SourceDescription, contigs: Sequence[FoundContig]) -> list[int]:
    """Rows of the contigs that pass the name, length and N filters; raises GenoMoEError when none does."""
    rows = [
        row
        for row, contig in enumerate(contigs)
        if contig.length >= source.min_length
        and source.takes(contig.name)
        and (contig.unknown < 0 or contig.unknown <= source.max_n_fraction * contig.length)
    ]
    if not rows:
        raise GenoMoEError(
            f"No contig of source {source.name!r} passes its filters ({len(contigs)} found, the longest of "
            f"{max((contig.length for contig in contigs), default=0):,} bases); "
            "check include, exclude, min_length and max_n_fraction."
        )
    return rows


class Placed(NamedTuple):
    """What BED files say about a source, on the global axis."""

    segments: Segments
    mask: np.ndarray
    """int64 [runs, 2] extra soft-masked stretches."""


def place_regions(
    source: SourceDescription, number: int, table: ContigTable, rows: np.ndarray, lengths: dict[str, int]
) -> Placed:
    """Segments and extra mask of a source whose chosen contigs are `rows` of the corpus's table.

    Args:
        source: its description.
        number: its row in Corpus.sources.
        table: the corpus's contigs.
        rows: the table's rows that belong to this source.
        lengths: all contigs of the source's files, chosen or not, so that a BED line on a contig that a filter
            left out isn't an error.
    """
    mask = np.empty((0, 2), dtype=np.int64)
    if source.mask is not None:
        mask = _on_axis(read_regions(source.mask, lengths), table, rows)
    if source.keep is not None:
        spans = _on_axis(read_regions(source.keep, lengths), table, rows)
        if not len(spans):
            raise GenoMoEError(f"{source.keep} leaves nothing of source {source.name!r}.")
    else:
        starts = table.offsets[rows]
        spans = np.stack([starts, starts + table.lengths[rows]], axis=1)
        spans = spans[spans[:, 1] > spans[:, 0]]
    return Placed(Segments(spans[:, 0], spans[:, 1], np.full(len(spans), number, dtype=np.int32)), mask)


def _on_axis(regions: Regions, table: ContigTable, rows: np.ndarray) -> np.ndarray:
    pieces = []
    for row in rows.tolist():
        name = table.names[row]
        if name in regions.starts:
            offset = table.offsets[row]
            pieces.append(np.stack([regions.starts[name], regions.ends[name]], axis=1) + offset)
    return np.concatenate(pieces) if pieces else np.empty((0, 2), dtype=np.int64)


def union_runs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The union of two sorted lists of runs, sorted and joined."""
    if not len(second):
        return first
    runs = np.concatenate([first, second])
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(runs[:, 1])
    start = np.concatenate([[True], runs[1:, 0] > reach[:-1]])
    last = np.concatenate([start[1:], [True]])
    return join_runs([np.stack([runs[start, 0], reach[last]], axis=1)])
