"""A corpus: contigs of one or more sources laid end to end, and the bases of any span of them.

**Global coordinates.** Contig c occupies [offset_c, offset_c + length_c) of one long axis; everything that samples,
shuffles or caches works on that axis. A *segment* is a stretch of it that windows may be cut from: windows never
leave their segment, so never cross a contig's end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.genome.sequence_files import expand_paths

UNMASKED_CASE = 0.9
"""A source of which more than this part is lower-case carries no soft-masking: its case is then ignored."""


class SourceInfo(NamedTuple):
    """What is known of one source, that is of one named set of files."""

    name: str
    weight: float
    soft_masked: bool
    """Whether lower case means masking here; False where nearly everything is lower-case."""
    tags: Mapping[str, str]


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


class Corpus(Protocol):
    """What datasets need; FastaCorpus and ZarrCorpus provide it, and give the same bases."""

    sources: tuple[SourceInfo, ...]
    contigs: ContigTable
    segments: Segments

    def read(self, start: int, end: int) -> np.ndarray:
        """Letters [start, end) of the global axis as uint8, case kept."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """Content hash of each file (or of the store): what must not change between a run and its resumption."""
        ...


def locate(contigs: ContigTable, positions: np.ndarray) -> np.ndarray:
    """Row of the contig that holds each global position."""
    return np.searchsorted(contigs.offsets, positions, side="right") - 1


def contig_table(names: list[str], lengths: Sequence[int], sources: Sequence[int]) -> ContigTable:
    """Lay contigs end to end."""
    sizes = np.asarray(lengths, dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if len(sizes) else sizes
    return ContigTable(names, sizes, offsets, np.asarray(sources, dtype=np.int32))


def whole_contigs(contigs: ContigTable, rows: np.ndarray | None = None) -> Segments:
    """One segment per (chosen) contig; empty contigs are left out."""
    rows = np.arange(len(contigs.names)) if rows is None else np.asarray(rows)
    rows = rows[contigs.lengths[rows] > 0]
    return Segments(
        contigs.offsets[rows], contigs.offsets[rows] + contigs.lengths[rows], contigs.sources[rows]
    )


class FastaCorpus:
    """Sequence files read in place.

    Args:
        paths: files, folders or globs, or a mapping of source name to such (each a path or a list of them).
            A plain list makes one source of each file, named as the file.
        weights: source name to sampling weight (default 1; 2 means twice as often as its size would give).

    Raises GenoMoEError when two files of one source define the same contig.
    """

    def __init__(
        self,
        paths: Sequence[str] | Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        named = _name_sources(paths)
        self.references: list[Reference] = []
        names: list[str] = []
        lengths: list[int] = []
        sources: list[int] = []
        infos = []
        self._owner: list[int] = []
        for number, (source, files) in enumerate(named.items()):
            seen: dict[str, Path] = {}
            first = len(self.references)
            for file in files:
                reference = Reference(file)
                for contig, length in reference.contigs.items():
                    if contig in seen:
                        raise GenoMoEError(
                            f"The contig {contig!r} is defined by both {seen[contig]} and {file}; "
                            "drop one of the files or put them in two sources."
                        )
                    seen[contig] = file
                    names.append(contig)
                    lengths.append(length)
                    sources.append(number)
                    self._owner.append(len(self.references))
                self.references.append(reference)
            weight = float((weights or {}).get(source, 1.0))
            masked = is_soft_masked(self.references[first:])
            infos.append(SourceInfo(source, weight, masked, {}))
        self.sources = tuple(infos)
        self.contigs = contig_table(names, lengths, sources)
        self.segments = whole_contigs(self.contigs)

    def read(self, start: int, end: int) -> np.ndarray:
        """Letters [start, end) of the global axis as uint8, case kept."""
        out = np.empty(end - start, dtype=np.uint8)
        row = int(locate(self.contigs, np.asarray(start)))
        place = start
        while place < end:
            offset, length = int(self.contigs.offsets[row]), int(self.contigs.lengths[row])
            stop = min(end, offset + length)
            if stop > place:
                reference = self.references[self._owner[row]]
                letters = reference.fetch_array(self.contigs.names[row], place - offset, stop - offset)
                out[place - start : stop - start] = letters
                place = stop
            row += 1
        return out

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each file, by its path."""
        return {str(reference.path): file_sha256(reference.path) for reference in self.references}


def _name_sources(paths: Sequence[str] | Mapping[str, Any]) -> dict[str, list[Path]]:
    if isinstance(paths, str | Path):
        paths = [str(paths)]
    if isinstance(paths, Mapping):
        return {
            str(name): [
                file
                for item in ([value] if isinstance(value, str | Path) else value)
                for file in expand_paths(item)
            ]
            for name, value in paths.items()
        }
    named: dict[str, list[Path]] = {}
    for item in paths:
        for file in expand_paths(item):
            key = file.name if file.name not in named else str(file)
            if key in named:
                raise GenoMoEError(f"{file} is listed twice.")
            named[key] = [file]
    if not named:
        raise GenoMoEError("The list of sequence files is empty; name at least one.")
    return named


def is_soft_masked(references: Sequence[Reference], sample: int = 1 << 22) -> bool:
    """Whether lower case means masking: False if over 90 % of the first `sample` bases are lower-case, or none."""
    lower = total = 0
    for reference in references:
        for contig, length in reference.contigs.items():
            if total >= sample:
                break
            letters = reference.fetch_array(contig, 0, min(length, sample - total))
            lower += int((letters >= 97).sum())
            total += len(letters)
    return 0 < lower <= UNMASKED_CASE * total


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
