"""Sequence files of any supported kind: find them, tell FASTA from GenBank, read their records."""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from genomoe.genome.alphabet import IUPAC
from genomoe.genome.compression import open_stream, require_file
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.fasta_parser import Header, Record, Report, raise_on_error, scan_fasta

if TYPE_CHECKING:
    from Bio.SeqRecord import SeqRecord

BUNDLED = "bundled:"
"""Prefix of a path inside the package's own small data sets, such as ``bundled:yeast/...fna.gz``."""

_FASTA = (".fa", ".fasta", ".fna", ".ffn", ".fas", ".fsa")
_GENBANK = (".gb", ".gbk", ".gbff", ".genbank")
_COMPRESSED = (".gz", ".bgz", ".bgzf", ".xz", ".zst", ".zstd")


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """`path` as a Path, with ``bundled:`` pointing into the package and ``~`` expanded."""
    text = os.fspath(path)
    if text.startswith(BUNDLED):
        return Path(str(resources.files("genomoe"))) / "bundled" / text[len(BUNDLED) :]
    return Path(text).expanduser()


def expand_paths(pattern: str | os.PathLike[str]) -> list[Path]:
    """The sequence files a path, a folder or a glob stands for, sorted by name.

    A folder stands for every FASTA and GenBank file below it, told by its ending. Raises GenoMoEError when
    nothing matches.
    """
    path = resolve_path(pattern)
    if path.is_dir():
        found = sorted(child for child in path.rglob("*") if child.is_file() and has_sequence_ending(child))
        if not found:
            raise GenoMoEError(
                f"The folder {path} holds no sequence file; files must end in one of "
                f"{', '.join(_FASTA + _GENBANK)}, optionally followed by {', '.join(_COMPRESSED)}."
            )
        return found
    if not path.exists() and glob.has_magic(str(path)):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not found:
            raise GenoMoEError(f"No file matches {str(path)!r}.")
        return found
    return [require_file(path)]


def has_sequence_ending(path: Path) -> bool:
    """Whether the name ends as FASTA or GenBank files do, compressed or not."""
    return _stem(path).endswith(_FASTA + _GENBANK)


def sequence_format(path: Path) -> Literal["fasta", "genbank"]:
    """GenBank by its ending or its first word, otherwise FASTA."""
    if _stem(path).endswith(_GENBANK):
        return "genbank"
    with open_stream(path) as stream:
        return "genbank" if stream.read(6).startswith(b"LOCUS ") else "fasta"


def _stem(path: Path) -> str:
    name = path.name.lower()
    for ending in _COMPRESSED:
        if name.endswith(ending):
            return name[: -len(ending)]
    return name


def scan_sequences(path: str | os.PathLike[str], report: Report = raise_on_error) -> Iterator[Header | bytes]:
    """Headers and pieces of letters, as `scan_fasta`, from FASTA or GenBank.

    GenBank's ORIGIN is printed in lower case by convention, which is not masking, so its letters come upper-case.
    """
    checked = require_file(path)
    if sequence_format(checked) == "fasta":
        yield from scan_fasta(checked, report)
        return
    for record in read_genbank(checked):
        yield record.header
        yield record.sequence


def read_genbank(path: str | os.PathLike[str]) -> Iterator[Record]:
    """Records of a GenBank file, letters upper-case, named by accession and version.

    Raises InputError for a file Biopython can't read, a record without sequence and a repeated name.
    """
    import io

    from Bio import SeqIO
    from Bio.Seq import UndefinedSequenceError

    checked = require_file(path)
    seen: set[str] = set()
    with open_stream(checked) as stream:
        text = io.TextIOWrapper(io.BufferedReader(_Raw(stream)), encoding="utf-8", errors="replace")
        try:
            records = SeqIO.parse(text, "genbank")
            while (record := _next_record(records, path)) is not None:
                named = record.id not in (None, "", "<unknown id>", "unknown")
                name = str(record.id if named else record.name)
                if name in seen:
                    raise InputError(f"{path}: the record name {name!r} is used twice; each must be unique.")
                seen.add(name)
                letters = bytes(record.seq or b"").upper()
                wrong = letters.translate(None, IUPAC)
                if wrong:
                    raise InputError(
                        f"{path}: record {name!r} holds {chr(wrong[0])!r}, which is no nucleotide code; "
                        "is it a protein record?"
                    )
                yield Record(Header(name, record.description or "", 0), letters)
        except UndefinedSequenceError:
            raise InputError(
                f"{path}: a record has no sequence (no ORIGIN block); fetch the full GenBank record."
            ) from None
        except (ValueError, AssertionError) as error:
            if isinstance(error, GenoMoEError):
                raise
            raise InputError(f"{path}: not readable as GenBank ({error}).") from None
    if not seen:
        raise InputError(f"{path}: no GenBank record in it; a record starts with LOCUS.")


def _next_record(records: Iterator[SeqRecord], path: str | os.PathLike[str]) -> SeqRecord | None:
    """The next record; a length other than its LOCUS line says, which Biopython only warns of, is an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record = next(records, None)
    for warning in caught:
        if "Expected sequence length" in str(warning.message):
            raise InputError(f"{path}: {str(warning.message).rstrip('.')} as the LOCUS line has it; fetch it again.")
    return record


def _raw_class() -> type:
    import io

    class Raw(io.RawIOBase):
        """Adapts anything with read(size) to the raw stream that io.BufferedReader wants."""

        def __init__(self, stream: object) -> None:
            self._stream = stream

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            data = self._stream.read(len(buffer))  # type: ignore[attr-defined]
            buffer[: len(data)] = data
            return len(data)

    return Raw


_Raw = _raw_class()
