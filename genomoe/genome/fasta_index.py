"""Where the letters of each record lie in a FASTA: found by one scan, or taken from a .fai that fits the file."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np

from genomoe.genome.compression import open_stream, require_file
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.random_access import ByteReader


class FastaIndex(NamedTuple):
    """Where the letters of each record lie in an uncompressed FASTA (the columns of a .fai file)."""

    names: list[str]
    lengths: np.ndarray
    """[contigs] int64, letters."""
    offsets: np.ndarray
    """[contigs] int64, byte of the first letter."""
    line_bases: np.ndarray
    """[contigs] int64, letters in a full line."""
    line_bytes: np.ndarray
    """[contigs] int64, bytes in a full line, line end included."""


class UnevenLinesError(GenoMoEError):
    """A record's lines differ in length, so its letters can't be found by arithmetic."""


def index_fasta(path: str | os.PathLike[str], chunk: int = 1 << 26) -> FastaIndex:
    """Scan a FASTA once and return where each record lies in its uncompressed bytes.

    Only the line structure is looked at; letters are checked when they are fetched.
    Raises UnevenLinesError where a record's lines differ in length or blanks stand in the file.
    """
    names: list[str] = []
    rows: list[tuple[int, int, int, int]] = []
    state = _IndexState(str(path))
    with open_stream(require_file(path)) as handle:
        position, carry = 0, b""
        while True:
            data = handle.read(chunk)
            block = carry + data
            if not block:
                break
            end = block.rfind(b"\n") + 1 if data else len(block)
            if not end:
                carry = block
                continue
            state.feed(block[:end], position, names, rows)
            position += end
            carry = block[end:]
            if not data:
                break
    state.close(rows)
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    if len(set(names)) != len(names):
        seen: set[str] = set()
        repeated = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InputError(f"{path}: the name {repeated!r} is used twice; run `genomoe corpus validate` on it.")
    return FastaIndex(names, *table.T)


class _IndexState:
    def __init__(self, path: str) -> None:
        self.path = path
        self.open = False
        self.offset = self.length = self.bases = self.width = 0
        self.short = False  # a line shorter than the first was seen, so it must be the record's last

    def close(self, rows: list[tuple[int, int, int, int]]) -> None:
        if self.open:
            rows.append((self.length, self.offset, self.bases, self.width))
        self.open = False

    def feed(self, block: bytes, position: int, names: list[str], rows: list[tuple[int, int, int, int]]) -> None:
        place = 0
        while place < len(block):
            if block[place] == 62:
                self.close(rows)
                end = block.find(b"\n", place)
                end = len(block) if end < 0 else end
                words = block[place + 1 : end].split(None, 1)
                if not words:
                    raise InputError(f"{self.path}: a '>' line has no name; run `genomoe corpus validate` on it.")
                names.append(words[0].decode("utf-8", "replace"))
                self.open, self.short = True, False
                self.offset, self.length, self.bases, self.width = position + end + 1, 0, 0, 0
                place = end + 1
                continue
            if not self.open:
                raise UnevenLinesError(f"{self.path}: text before the first record.")
            end = block.find(b"\n>", place)
            end = len(block) if end < 0 else end + 1
            self._lines(np.frombuffer(block, dtype=np.uint8)[place:end])
            place = end

    def _lines(self, text: np.ndarray) -> None:
        ends = np.flatnonzero(text == 10) + 1
        if not ends.size or ends[-1] != text.size:
            ends = np.append(ends, text.size)
        widths = np.diff(ends, prepend=0)
        bodies = widths - (text[ends - 1] == 10)
        last = ends - 1 - (text[ends - 1] == 10)
        bodies = bodies - ((bodies > 0) & (text[np.maximum(last, 0)] == 13))
        filled = np.flatnonzero(bodies)
        blank_tail = len(bodies) - (filled[-1] + 1 if filled.size else 0)
        if blank_tail:  # blank lines after a record's last line are harmless
            bodies, widths = bodies[: len(bodies) - blank_tail], widths[: len(widths) - blank_tail]
            if not bodies.size:
                self.short = True
                return
        if not self.width:
            self.bases, self.width = int(bodies[0]), int(widths[0])
        full = (bodies == self.bases) & (widths == self.width)
        broken = np.flatnonzero(~full)
        ends_short = broken.size == 1 and broken[0] == len(bodies) - 1 and bodies[-1] <= self.bases
        if (self.short and len(bodies)) or not (broken.size == 0 or ends_short) or (bodies == 0).any():
            raise UnevenLinesError(f"{self.path}: the lines of a record differ in length.")
        self.short = broken.size == 1 or blank_tail > 0
        self.length += int(bodies.sum())


def read_fai(path: Path, reader: ByteReader) -> FastaIndex | None:
    """The samtools index at `path` if it fits the file byte by byte between records, else None (with a warning).

    Each record's letters must end where the next record's header starts, that header must carry the next row's
    name, and the last record must end with the file. Together with the line-end check of every fetch, a table that
    passes can't yield a wrong base.
    """
    if not path.is_file():
        return None
    try:
        fields = [line.split("\t") for line in path.read_text().splitlines()]
        names = [row[0] for row in fields]
        columns = np.array([[int(value) for value in row[1:5]] for row in fields], dtype=np.int64)
        if columns.ndim != 2 or columns.shape[1] != 4 or len(set(names)) != len(names):
            raise ValueError
    except (OSError, ValueError):
        warnings.warn(f"{path} is not a readable index and was left aside.", stacklevel=3)
        return None
    index = FastaIndex(names, *columns.T)
    if not _index_fits(index, reader):
        warnings.warn(f"{path} does not belong to the file as it is now and was left aside.", stacklevel=3)
        return None
    return index


def _index_fits(index: FastaIndex, reader: ByteReader) -> bool:
    if (index.lengths < 0).any() or (index.offsets < 0).any():
        return False
    if ((index.lengths > 0) & ((index.line_bases < 1) | (index.line_bytes < index.line_bases))).any():
        return False
    bases = np.maximum(index.line_bases, 1)
    last = index.lengths - 1
    ends = index.offsets + np.where(index.lengths > 0, last // bases * index.line_bytes + last % bases + 1, 0)
    starts = np.append(index.offsets, reader.size)
    if (np.diff(index.offsets) < 0).any() or (ends > starts[1:]).any():
        return False
    place = 0
    for row, name in enumerate(index.names):
        gap = reader.read(place, int(index.offsets[row])).lstrip(b"\r\n")
        words = gap[1:].split(None, 1)
        complete = gap.endswith(b"\n") or int(index.offsets[row]) >= reader.size
        if gap[:1] != b">" or gap.count(b"\n") > 1 or not complete:
            return False
        if not words or words[0].decode("utf-8", "replace") != name:
            return False
        place = int(ends[row])
    return not reader.read(place, reader.size).strip(b"\r\n")
