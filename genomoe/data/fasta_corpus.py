"""FastaCorpus: sequence files read in place, without a store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from genomoe.data.corpus import (
    CASE_SAMPLE,
    Segments,
    SourceInfo,
    apply_mask,
    contig_table,
    file_sha256,
    is_masking,
    locate,
)
from genomoe.data.description import CorpusDescription, SourceDescription, describe_paths
from genomoe.data.selection import FoundContig, chosen, place_regions, require_unique
from genomoe.genome.compression import detect_compression
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import SMALL_FILE, Reference

PIECE = 1 << 17
"""Bases read at a time: what lies between the file and the letters then stays in a core's cache."""
_UPPER = bytes(range(97)) + bytes(range(65, 91)) + bytes(range(123, 256))


class FastaCorpus:
    """The sources of a description, read from their files through Reference.

    Args:
        description: a CorpusDescription, or what describe_paths takes: files, folders, globs, or a mapping of
            source name to such.
        weights: source name to sampling weight, for plain paths.

    Raises GenoMoEError when two files of one source define the same contig or a filter leaves nothing.
    """

    def __init__(
        self,
        description: CorpusDescription | str | os.PathLike[str] | Sequence[Any] | Mapping[str, Any],
        *,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(description, CorpusDescription):
            description = describe_paths(description, weights)
        self.description = description
        sizes = [file.stat().st_size for source in description.sources for file in source.files]
        self._by_position = sum(sizes) > SMALL_FILE
        self._fingerprint: dict[str, str] | None = None
        self.references: list[Reference] = []
        self._owner: list[int] = []
        self._fold_case: list[bool] = []
        names: list[str] = []
        lengths: list[int] = []
        numbers: list[int] = []
        all_lengths: list[dict[str, int]] = []
        for number, source in enumerate(description.sources):
            found, owners = self._open(source)
            require_unique(source, found)
            all_lengths.append({contig.name: contig.length for contig in found})
            for row in chosen(source, found):
                names.append(found[row].name)
                lengths.append(found[row].length)
                numbers.append(number)
                self._owner.append(owners[row])
        self.contigs = contig_table(names, lengths, numbers)
        placed = [
            place_regions(source, n, self.contigs, np.flatnonzero(self.contigs.sources == n), all_lengths[n])
            for n, source in enumerate(description.sources)
        ]
        self.segments = Segments(*(np.concatenate(c) for c in zip(*(p.segments for p in placed), strict=True)))
        self._extra_mask = np.concatenate([p.mask for p in placed])
        infos = []
        for number, source in enumerate(description.sources):
            masked = self._is_masked(number) if source.soft_mask is None else source.soft_mask
            self._fold_case.append(not masked)
            infos.append(
                SourceInfo(
                    source.name,
                    source.weight,
                    masked or bool(len(placed[number].mask)),
                    dict(source.tags),
                    source.split,
                )
            )
        self.sources = tuple(infos)

    def _open(self, source: SourceDescription) -> tuple[list[FoundContig], list[int]]:
        found, owners = [], []
        for file in source.files:
            reference = self._reference(file)
            for contig, length in reference.contigs.items():
                unknown = -1
                if source.max_n_fraction < 1:
                    letters = reference.fetch_array(contig, 0, length)
                    unknown = int(((letters == 78) | (letters == 110)).sum())
                found.append(FoundContig(contig, length, unknown, file))
                owners.append(len(self.references))
            self.references.append(reference)
        return found, owners

    def _reference(self, file: Path) -> Reference:
        """In memory where the whole corpus is small; otherwise by position where the file allows it."""
        if self._by_position and detect_compression(file) in ("plain", "bgzip"):
            try:
                return Reference(file, in_memory=False)
            except GenoMoEError:
                pass  # uneven lines, or GenBank
        return Reference(file)

    def _is_masked(self, number: int) -> bool:
        rows = np.flatnonzero(self.contigs.sources == number)
        lower = total = 0
        for row in rows.tolist():
            if total >= CASE_SAMPLE:
                break
            length = min(int(self.contigs.lengths[row]), CASE_SAMPLE - total)
            letters = self.references[self._owner[row]].fetch_array(self.contigs.names[row], 0, length)
            lower += int((letters >= 97).sum())
            total += length
        return is_masking(lower, total)

    def read(self, start: int, end: int) -> np.ndarray:
        """Letters [start, end) of the global axis as uint8; lower case is soft-masked."""
        out = np.empty(end - start, dtype=np.uint8)
        row = int(locate(self.contigs, np.asarray(start)))
        place = start
        while place < end:
            offset, length = int(self.contigs.offsets[row]), int(self.contigs.lengths[row])
            stop = min(end, offset + length)
            reference, name = self.references[self._owner[row]], self.contigs.names[row]
            for low in range(place, stop, PIECE):
                high = min(low + PIECE, stop)
                letters = reference.fetch_array(name, low - offset, high - offset)
                if self._fold_case[self.contigs.sources[row]]:
                    letters = np.frombuffer(letters.tobytes().translate(_UPPER), dtype=np.uint8)
                out[low - start : high - start] = letters
            place = stop
            row += 1
        apply_mask(out, start, self._extra_mask)
        return out

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each source file, by its path; taken once."""
        if self._fingerprint is None:
            self._fingerprint = {str(reference.path): file_sha256(reference.path) for reference in self.references}
        return self._fingerprint
