"""Reference: the bases of any interval of a sequence file, and never a wrong one.

How a file is read is chosen once, when it is opened:

- **indexed**: large plain and bgzip FASTA with even lines. The record table comes from the ``.fai`` beside the file
  if that agrees with the file (checked record by record), otherwise from one scan; nothing is written. Every fetch
  checks that line ends lie where the table says.
- **in memory**: small files, gzip, xz, zstd and GenBank files, and FASTA with uneven lines. They are parsed whole.

Handles are opened per process and lazily, so a Reference may be pickled, forked and spawned.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

import numpy as np

from genomoe.genome.alphabet import IUPAC, reverse_complement
from genomoe.genome.compression import detect_compression, require_file
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.fasta_index import FastaIndex, UnevenLinesError, index_fasta, read_fai
from genomoe.genome.fasta_parser import Header
from genomoe.genome.random_access import BgzfFile, ByteReader, PlainFile, check_signature, file_signature
from genomoe.genome.sequence_files import resolve_path, scan_sequences, sequence_format
from genomoe.wording import counted

SMALL_FILE = 1 << 26
"""Plain files up to this many bytes (and bgzip files up to a quarter of it) are simply held in memory."""

_LETTERS = IUPAC + IUPAC.lower()


class Reference:
    """A sequence file (FASTA in any compression, or GenBank) read by interval.

    Args:
        path: the file; ``bundled:...`` names a file that comes with GenoMoE.
        in_memory: True parses the file whole; False refuses to (an error says what to run instead);
            None (the default) chooses.

    Raises GenoMoEError for a missing file and InputError, with file and line, for a broken one.
    """

    def __init__(self, path: str | os.PathLike[str], *, in_memory: bool | None = None) -> None:
        self.path: Path = require_file(resolve_path(path))
        self._signature = file_signature(str(self.path))
        self._sequences: dict[str, bytes] | None = None
        self._reader: ByteReader | None = None
        self._index: FastaIndex | None = None
        self._rows: dict[str, int] = {}
        self._choose(in_memory)
        if self._index is not None:
            self.contigs: dict[str, int] = dict(zip(self._index.names, self._index.lengths.tolist(), strict=True))
            self._rows = {name: row for row, name in enumerate(self._index.names)}
        else:
            self._sequences = self._load()
            self.contigs = {name: len(sequence) for name, sequence in self._sequences.items()}

    def fetch(self, interval: Interval, pad: bool = False) -> bytes:
        """The letters of `interval`, case kept; the minus strand comes reverse-complemented.

        Args:
            interval: 0-based, half-open.
            pad: fill with N what lies beyond the contig's ends, so that the length is always len(interval);
                without it such an interval is an error.
        """
        length = self._length(interval.contig)
        start, end = max(interval.start, 0), min(interval.end, length)
        if not pad and (start != interval.start or end != interval.end):
            raise GenoMoEError(
                f"{interval} reaches beyond contig {interval.contig!r}, which has {length:,} bases in {self.path}; "
                "shorten the interval or ask for padding."
            )
        if end <= start:
            sequence = b"N" * len(interval)
        else:
            sequence = self._letters(interval.contig, start, end)
            sequence = b"N" * (start - interval.start) + sequence + b"N" * (interval.end - end)
        return reverse_complement(sequence) if interval.strand == "-" else sequence

    def fetch_array(self, contig: str, start: int, end: int) -> np.ndarray:
        """Letters [start, end) of the plus strand as uint8 (a read-only view); the interval must lie inside."""
        if not 0 <= start <= end <= self._length(contig):
            raise GenoMoEError(f"[{start}, {end}) does not lie inside contig {contig!r} of {self.path}.")
        return np.frombuffer(self._letters(contig, start, end), dtype=np.uint8)

    def check_ref(self, variant: Variant) -> None:
        """Raises GenoMoEError unless the reference holds variant.ref at its position (case ignored)."""
        length = self._length(variant.contig)
        if variant.end > length:
            raise GenoMoEError(f"{variant} ends at {variant.end:,} but contig {variant.contig!r} has {length:,} bases.")
        found = self._letters(variant.contig, variant.position, variant.end).upper().decode()
        if found != variant.ref:
            raise GenoMoEError(
                f"{variant} gives REF {variant.ref} but {self.path.name} has {found} there; "
                "the variants may be called against another assembly, or their positions may be 0-based."
            )

    def _length(self, contig: str) -> int:
        try:
            return self.contigs[contig]
        except KeyError:
            close = difflib.get_close_matches(contig, self.contigs, n=3, cutoff=0.3) or list(self.contigs)[:3]
            raise GenoMoEError(
                f"{self.path} has no contig {contig!r}; the nearest names are {', '.join(close)}."
            ) from None

    def _letters(self, contig: str, start: int, end: int) -> bytes:
        if self._index is None:
            if self._sequences is None:  # unpickled in another process
                check_signature(str(self.path), self._signature)
                self._sequences = self._load()
            return self._sequences[contig][start:end]
        return self._read_lines(self._rows[contig], start, end)

    def _read_lines(self, row: int, start: int, end: int) -> bytes:
        if end <= start:
            return b""
        assert self._reader is not None
        assert self._index is not None
        bases, width = int(self._index.line_bases[row]), int(self._index.line_bytes[row])
        first = start // bases
        offset = int(self._index.offsets[row])
        raw = self._reader.read(
            offset + first * width + start % bases,
            offset + (end - 1) // bases * width + (end - 1) % bases + 1,
        )
        line_ends = (end - 1) // bases - first
        letters = raw.replace(b"\n", b"").replace(b"\r", b"") if line_ends else raw  # a third of translate's time
        line_feeds = raw[bases - start % bases + width - bases - 1 :: width] if line_ends else b""
        if (
            len(letters) != end - start
            or line_feeds != b"\n" * line_ends
            or len(raw) != end - start + line_ends * (width - bases)
            or letters.translate(None, _LETTERS)
        ):
            raise InputError(
                f"{self.path}: record {self._index.names[row]!r} holds, near base {start + 1:,}, a character that is "
                "no nucleotide code or a line of another length; run `genomoe corpus validate` on the file."
            )
        return letters

    def _choose(self, in_memory: bool | None) -> None:
        kind = detect_compression(self.path)
        size = self._signature[0]
        if in_memory:
            return
        random_access = kind in ("plain", "bgzip") and sequence_format(self.path) == "fasta"
        if not random_access:
            if in_memory is False:
                raise GenoMoEError(
                    f"{self.path} can't be read by position ({kind}, {sequence_format(self.path)}); compress it with "
                    "bgzip (`gunzip -c FILE | bgzip > NEW`) or run `genomoe corpus build` on it."
                )
            return
        if in_memory is None and size <= (SMALL_FILE if kind == "plain" else SMALL_FILE // 4):
            return
        reader: ByteReader = PlainFile(str(self.path)) if kind == "plain" else BgzfFile(str(self.path))
        index = read_fai(Path(f"{self.path}.fai"), reader)
        if index is None:
            try:
                index = index_fasta(self.path)
            except UnevenLinesError as error:
                if in_memory is False:
                    raise InputError(
                        f"{error} Random access needs even lines; run `genomoe corpus build` on the file."
                    ) from None
                return
            if not index.names:
                raise InputError(f"{self.path}: no line starts with '>', so there is no FASTA record in it.")
        self._reader, self._index = reader, index

    def _load(self) -> dict[str, bytes]:
        sequences: dict[str, bytes] = {}
        pieces: dict[str, list[bytes]] = {}
        name = ""
        for item in scan_sequences(self.path):
            if isinstance(item, Header):
                if name:
                    sequences[name] = b"".join(pieces.pop(name))
                name = item.name
                pieces[name] = []
            else:
                pieces[name].append(item)
        sequences[name] = b"".join(pieces.pop(name))
        return sequences

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_sequences"] = None
        return state

    def __repr__(self) -> str:
        how = "in memory" if self._index is None else "indexed"
        return f"Reference({str(self.path)!r}, {counted(len(self.contigs), 'contig')}, {how})"
