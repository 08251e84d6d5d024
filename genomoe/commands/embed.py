"""`genomoe embed`: FASTA records, windows of them, or the intervals of a BED file to vectors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from genomoe.commands.device import resolve_device
from genomoe.commands.outputs import check_ending, table_writer
from genomoe.commands.places import Place, find_places, parts, read_records, windows
from genomoe.files import replacing
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.inference.predictor import Predictor, from_pretrained
from genomoe.wording import counted

PART_ROWS, PART_BASES = 4096, 1 << 22
"""A table is written in parts of so many rows, or fewer that hold so many bases: the most that is in memory."""


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
            places = windows(places, window, stride)
        count = _write_table(reference, predictor, out, columns, places, options)
    print(f"{counted(count, 'vector')} written: {out}", file=sys.stderr)


def _write_arrays(sequences: Path, predictor: Predictor, out: Path, options: dict[str, Any]) -> int:
    names, records = read_records(sequences, predictor)
    with Console(stderr=True).status(f"embedding {counted(len(records), 'sequence')}"):
        vectors = predictor.embed(records, **options)
    unpooled = options["pool"] == "none"
    arrays = dict(zip(names, vectors, strict=True)) if unpooled else {"names": names, "vectors": vectors}
    with replacing(out) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)
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
        for part in parts(places, rows=PART_ROWS, bases=PART_BASES):
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
