"""Check sequence files against every rule, without stopping at the first fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from genomoe.data.corpus import is_masking
from genomoe.data.description import CorpusDescription
from genomoe.genome.compression import detect_compression
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.fasta_index import read_fai
from genomoe.genome.fasta_parser import Header, Report, Verdict
from genomoe.genome.random_access import BgzfFile, PlainFile
from genomoe.genome.sequence_files import scan_sequences, sequence_format

MOST_VERDICTS = 100
"""Verdicts kept per file; the rest are counted."""


@dataclass(kw_only=True)
class FileCheck:
    """What was found in one file."""

    path: Path
    verdicts: list[Verdict]
    """The first MOST_VERDICTS."""
    errors: int = 0
    warnings: int = 0
    contigs: int = 0
    bases: int = 0
    lower: int = 0


def validate_corpus(
    description: CorpusDescription, progress: Callable[[str, int, int], None] | None = None
) -> list[FileCheck]:
    """Every file of a corpus; a contig defined twice within a source is an error of the later file."""
    checks = []
    total = sum(len(source.files) for source in description.sources)
    for source in description.sources:
        seen: dict[str, Path] = {}
        for file in source.files:
            check, headers = _Check(file).run()
            for header in headers:
                if header.name in seen:
                    _add(
                        check,
                        "error",
                        header.line,
                        "duplicate-name",
                        f"the contig {header.name!r} is defined in {seen[header.name]} too; drop one of the files "
                        "or put them in two sources.",
                    )
            seen.update((header.name, file) for header in headers)
            checks.append(check)
            if progress:
                progress("checking files", len(checks), total)
    return checks


class _Check:
    def __init__(self, path: Path) -> None:
        self.result = FileCheck(path=path, verdicts=[])

    def run(self) -> tuple[FileCheck, list[Header]]:
        result = self.result
        headers: list[Header] = []
        names: set[str] = set()
        try:
            for item in scan_sequences(result.path, self._report()):
                if isinstance(item, Header):
                    if item.name not in names:
                        names.add(item.name)
                        headers.append(item)
                    result.contigs += 1
                else:
                    result.bases += len(item)
                    if not item.isupper():
                        result.lower += sum(item.count(letter) for letter in b"acgtunryswkmbdhv")
        except (GenoMoEError, OSError) as error:
            _add_exception(result, error)
            return result, headers
        if not result.errors:
            self._whole_file()
        return result, headers

    def _report(self) -> Report:
        def report(verdict: Verdict) -> None:
            _count(self.result, verdict)

        return report

    def _whole_file(self) -> None:
        result = self.result
        if result.lower and not is_masking(result.lower, result.bases):
            _add(
                result,
                "warn",
                0,
                "all-lower-case",
                f"{result.lower / result.bases:.0%} of the bases are lower-case, which can't be soft-masking; "
                "case is ignored.",
            )
        kind = detect_compression(result.path)
        if kind in ("gzip", "xz", "zstd") and sequence_format(result.path) == "fasta":
            _add(
                result,
                "warn",
                0,
                "no-random-access",
                f"{kind} can't be read by position, so the file is held in memory; use bgzip or "
                "`genomoe corpus build` for a large one.",
            )
        index = Path(f"{result.path}.fai")
        if index.exists() and kind in ("plain", "bgzip"):
            import warnings

            reader = PlainFile(str(result.path)) if kind == "plain" else BgzfFile(str(result.path))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                usable = read_fai(index, reader) is not None
            if not usable:
                _add(
                    result,
                    "warn",
                    0,
                    "stale-index",
                    f"{index.name} does not fit the file and is left aside; make it again with `samtools faidx`.",
                )


def _add(check: FileCheck, level: str, line: int, rule: str, message: str) -> None:
    _count(check, Verdict(level=level, path=str(check.path), line=line, rule=rule, message=message))  # type: ignore[arg-type]


def _count(check: FileCheck, verdict: Verdict) -> None:
    if verdict.level == "error":
        check.errors += 1
    else:
        check.warnings += 1
    if len(check.verdicts) < MOST_VERDICTS:
        check.verdicts.append(verdict)


def _add_exception(check: FileCheck, error: Exception) -> None:
    """A fault that ended the reading: its message may start with the file, and with a line."""
    text, line = str(error), 0
    prefix = f"{check.path}:"
    if text.startswith(prefix):
        text = text[len(prefix) :].lstrip()
        number, _, rest = text.partition(":")
        if number.isdigit():
            line, text = int(number), rest.lstrip()
    rule = "unreadable" if isinstance(error, InputError) else "missing"
    _add(check, "error", line, rule, text)
