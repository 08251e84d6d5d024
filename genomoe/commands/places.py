"""What the rows of `genomoe embed` and `genomoe routing` are about: records, windows of them, or BED intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from genomoe.data.tables import read_table, table_intervals
from genomoe.genome.coordinates import Interval
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.inference.predictor import Predictor


class Place(NamedTuple):
    """What a row of a table is about."""

    interval: Interval
    name: str
    """Of the record, or of the BED line."""


def find_places(
    reference: Reference, predictor: Predictor, *, window: int | None, regions: Path | None = None
) -> tuple[list[str], Iterable[Place]]:
    """What to read, before it is cut into windows, and the columns that tell its rows apart.

    Raises GenoMoEError for a window, and without one for a place, that the model does not read at once; for a
    line of the BED file that is empty or not on the reference.
    """
    longest = longest_input(predictor)
    if window is not None:
        check_length("A window", window, longest, "give a shorter --window")
        longest = max(reference.contigs.values())  # of what is cut
    advice = "cut it with --window"
    if regions is None:
        for name, length in reference.contigs.items():
            check_length(f"{reference.path}: record {name!r}", length, longest, advice)
        whole = [Place(Interval(name, 0, length), name) for name, length in reference.contigs.items()]
        return ["contig", "start", "end"] if window else ["name"], whole
    if ".bed" not in (suffix.lower() for suffix in regions.suffixes):
        raise GenoMoEError(f"--regions takes a BED file, whose name ends in .bed or .bed.gz, not {regions}.")
    table = read_table(regions)
    roles = {role: role for role in ("contig", "start", "end", "strand")}
    intervals = table_intervals(str(regions), table, roles, one_based=False)
    for row, interval in enumerate(intervals, 1):
        try:
            if interval.end > reference.contigs.get(interval.contig, -1):
                reference.fetch(interval)  # which says what is wrong
            check_length(f"{interval.contig} [{interval.start}, {interval.end})", len(interval), longest, advice)
        except GenoMoEError as error:
            raise GenoMoEError(f"{regions}, row {row}: {error}") from None
    names = table["name"].astype(str) if "name" in table else [""] * len(table)
    columns = ["contig", "start", "end", *(column for column in ("name", "strand") if column in table)]
    return columns, [Place(interval, name) for interval, name in zip(intervals, names, strict=True)]


def longest_input(predictor: Predictor) -> int:
    """Bases that the model reads at once."""
    return predictor.model.config.max_context * predictor.tokenizer.bases_per_token


def check_length(where: str, bases: int, longest: int, advice: str = "cut it into windows") -> None:
    """Raises GenoMoEError, which begins with `where`, for what is empty or longer than the model reads at once."""
    if not bases:
        raise GenoMoEError(f"{where} has 0 bases: leave it out.")
    if bases > longest:
        raise GenoMoEError(f"{where} has {bases:,} bases, but the model reads at most {longest:,} at once: {advice}.")


def read_records(path: Path, predictor: Predictor) -> tuple[list[str], list[bytes]]:
    """Names and letters of all records of a FASTA file; GenoMoEError for one that is empty or does not fit."""
    reference = Reference(path)
    for name, length in reference.contigs.items():
        check_length(f"{path}: record {name!r}", length, longest_input(predictor))
    names = list(reference.contigs)
    return names, [reference.fetch(Interval(name, 0, reference.contigs[name])) for name in names]


def windows(places: Iterable[Place], length: int, stride: int | None = None) -> Iterator[Place]:
    """Places cut as `Interval.windows` does; each keeps the name of what it was cut from."""
    return (Place(window, name) for whole, name in places for window in whole.windows(length, stride))


def parts(places: Iterable[Place], *, rows: int, bases: int) -> Iterator[list[Place]]:
    """Lists of `rows` places, or of fewer that hold `bases` bases or more: what is computed and written at once."""
    part: list[Place] = []
    held = 0
    for place in places:
        part.append(place)
        held += len(place.interval)
        if len(part) >= rows or held >= bases:
            yield part
            part, held = [], 0
    if part:
        yield part
