"""`genomoe embed`: FASTA records, windows of them, or the intervals of a BED file to vectors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console

from genomoe.commands.device import resolve_device
from genomoe.commands.outputs import check_ending, table_writer
from genomoe.data.tables import read_table, table_intervals
from genomoe.files import replacing
from genomoe.genome.coordinates import Interval
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.inference.predictor import Predictor, from_pretrained
from genomoe.wording import counted

PART_ROWS, PART_BASES = 4096, 1 << 22
"""A table is written in parts of so many rows, or fewer that hold so many bases: the most that is in memory."""


class Place(NamedTuple):
    """What a row of a table is about."""

    interval: Interval
    name: str
    """Of the record, or of the BED line."""


def run(
    sequences: Path,
    *,
    model: Path,
    out: Path,
    window: int | None,
    stride: int | None,
    regions: Path | None,
    layer: int,
    pool: str,
    strands: str,
    device: str,
    dtype: str | None,
) -> None:
    """Write `out`: .npz holds names and vectors (or, unpooled, an array for each record); a table a row each.

    A table is written part by part. Its rows are records by name, with `window` or `regions` places by contig,
    start and end (0-based, half-open, as in BED), and by name and strand where the BED file has them.
    """
    if window is None and regions is None:
        check_ending(out, ".npz", ".parquet", ".tsv")
    else:
        check_ending(out, ".parquet", ".tsv")
    if stride is not None and window is None:
        raise GenoMoEError("--stride says how far apart windows start: give their length with --window.")
    if pool == "none" and not out.name.endswith(".npz"):
        raise GenoMoEError("Vectors of single tokens (--pool none) go to a .npz file, of whole records.")
    predictor = from_pretrained(model, device=resolve_device(device), dtype=dtype)
    options = {"layer": layer, "pool": pool, "strands": strands}
    if out.name.endswith(".npz"):
        count = _write_arrays(sequences, predictor, out, options)
    else:
        reference = Reference(sequences)
        columns, places = find_places(reference, predictor, regions=regions, window=window)
        if window is not None:
            places = (Place(part, name) for whole, name in places for part in whole.windows(window, stride))
        count = _write_table(reference, predictor, out, columns, places, options)
    print(f"{counted(count, 'vector')} written: {out}", file=sys.stderr)


def find_places(
    reference: Reference, predictor: Predictor, *, regions: Path | None, window: int | None
) -> tuple[list[str], Iterable[Place]]:
    """What to embed, before it is cut into windows, and the columns that tell its rows apart.

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


def _write_arrays(sequences: Path, predictor: Predictor, out: Path, options: dict[str, Any]) -> int:
    names, records = read_records(sequences, predictor)
    with Console(stderr=True).status(f"embedding {counted(len(records), 'sequence')}"):
        vectors = predictor.embed(records, **options)
    unpooled = options["pool"] == "none"
    arrays = dict(zip(names, vectors, strict=True)) if unpooled else {"names": names, "vectors": vectors}
    with replacing(out) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return len(records)


def _write_table(
    reference: Reference,
    predictor: Predictor,
    out: Path,
    columns: list[str],
    places: Iterable[Place],
    options: dict[str, Any],
) -> int:
    count = 0
    with Console(stderr=True).status("embedding") as status, table_writer(out) as append:
        for part in _parts(places):
            vectors = np.asarray(predictor.embed([reference.fetch(place.interval) for place in part], **options))
            keys = {
                column: [place.name if column == "name" else getattr(place.interval, column) for place in part]
                for column in columns
            }
            numbers = pd.DataFrame(vectors, columns=[f"e{i}" for i in range(vectors.shape[1])])
            append(pd.concat([pd.DataFrame(keys), numbers], axis=1))
            count += len(part)
            status.update(f"embedding: {count:,} done, the last {part[-1].interval}")
    return count


def _parts(places: Iterable[Place]) -> Iterator[list[Place]]:
    part: list[Place] = []
    bases = 0
    for place in places:
        part.append(place)
        bases += len(place.interval)
        if len(part) >= PART_ROWS or bases >= PART_BASES:
            yield part
            part, bases = [], 0
    if part:
        yield part
