"""Parse one source file into a raw copy of its letters: the first half of building a store, one file a process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from genomoe.data.corpus import file_sha256, join_runs, letter_runs, lower_case_runs
from genomoe.genome.errors import IntegrityError
from genomoe.genome.fasta_parser import Header, Verdict, raise_on_error
from genomoe.genome.random_access import file_signature
from genomoe.genome.sequence_files import scan_sequences

_UPPER_DNA = bytes(range(97)) + bytes(range(65, 91)) + bytes(range(123, 256))
_UPPER_DNA = _UPPER_DNA.translate(bytes.maketrans(b"U", b"T"))


class ParsedContig(NamedTuple):
    """One record of a source file, as it lies in the file's raw copy."""

    name: str
    length: int
    unknown: int
    gc: int
    ambiguous: int
    content: int
    """The first 8 bytes of the SHA-256 of its letters, upper-case."""


class ParsedFile(NamedTuple):
    """A source file, parsed into a raw copy of its letters."""

    path: Path
    raw: Path
    size: int
    mtime_ns: int
    sha256: str
    contigs: list[ParsedContig]
    lower: np.ndarray
    """int64 [runs, 2] lower-case stretches, as positions in the raw copy; none crosses a contig's end."""
    letters: np.ndarray
    """int64 [runs, 3] start, end and letter of stretches of N and other ambiguity codes, likewise."""
    warnings: list[Verdict]


def parse_file(path: Path, raw: Path) -> ParsedFile:
    """Write the upper-case letters of every record of `path` to `raw`, end to end.

    Raises InputError, with file and line, at the first error.
    """
    info = path.stat()
    warned: list[Verdict] = []

    def report(verdict: Verdict) -> None:
        raise_on_error(verdict)
        warned.append(verdict)

    contigs: list[ParsedContig] = []
    runs: list[np.ndarray] = []
    others: list[np.ndarray] = []
    open_runs: list[np.ndarray] = []
    name, place, start = "", 0, 0
    counts = [0, 0, 0]
    digest = hashlib.sha256()

    def close() -> None:
        if name:
            content = int.from_bytes(digest.digest()[:8], "little", signed=True)
            unknown, gc, ambiguous = counts
            contigs.append(ParsedContig(name, place - start, unknown, gc, ambiguous, content))
            if open_runs:
                runs.append(join_runs(open_runs))

    with open(raw, "wb") as out:
        for item in scan_sequences(path, report):
            if isinstance(item, Header):
                close()
                name, start, counts, open_runs = item.name, place, [0, 0, 0], []
                digest = hashlib.sha256()
                continue
            if not item.isupper():
                open_runs.append(lower_case_runs(np.frombuffer(item, dtype=np.uint8), place))
            letters = item.translate(_UPPER_DNA)
            plain = len(letters) - len(letters.translate(None, b"ACGT"))
            unknown = letters.count(b"N") if plain < len(letters) else 0
            if plain < len(letters):
                others.append(letter_runs(np.frombuffer(letters, dtype=np.uint8), place))
            counts[0] += unknown
            counts[1] += len(letters) - len(letters.translate(None, b"GC"))
            counts[2] += len(letters) - plain - unknown
            digest.update(letters)
            out.write(letters)
            place += len(letters)
        close()
    lower = np.concatenate(runs) if runs else np.empty((0, 2), dtype=np.int64)
    letters_table = np.concatenate([np.empty((0, 3), dtype=np.int64), *others])
    digest_of_file = file_sha256(path)
    if file_signature(str(path)) != (info.st_size, info.st_mtime_ns):
        raise IntegrityError(f"{path} changed while it was being read; run the build again.")
    return ParsedFile(path, raw, info.st_size, info.st_mtime_ns, digest_of_file, contigs, lower, letters_table, warned)
