"""`genomoe routing`: which experts every base went to."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from genomoe.commands.device import resolve_device
from genomoe.commands.outputs import check_ending, table_writer
from genomoe.commands.places import find_places, parts, windows
from genomoe.genome.fasta import Reference
from genomoe.inference.predictor import from_pretrained
from genomoe.inference.routing import expert_load
from genomoe.wording import counted

PART_ROWS, PART_BASES = 4096, 1 << 16
"""The table is written in parts of so many places, or fewer that hold so many bases (a row a base and layer)."""


def run(sequences: Path, *, model: Path, out: Path, window: int | None, device: str, dtype: str | None) -> None:
    """Write a row for each base and layer as it goes, and print the load of the experts.

    With `window` records of any length are read in windows of so many bases, each as if nothing came before it;
    `position` is the place in the record all the same.
    """
    check_ending(out, ".tsv", ".csv", ".parquet")
    predictor = from_pretrained(model, device=resolve_device(device), dtype=dtype)
    reference = Reference(sequences)
    _, places = find_places(reference, predictor, window=window)
    if window is not None:
        places = windows(places, window)
    rows, chosen = 0, pd.DataFrame()
    with Console(stderr=True).status("routing") as status, table_writer(out) as append:
        for part in parts(places, rows=PART_ROWS, bases=PART_BASES):
            table = predictor.routing([reference.fetch(place.interval) for place in part])
            table["position"] += table["sequence"].map(lambda index, part=part: part[index].interval.start)
            table["sequence"] = [part[index].name for index in table["sequence"]]
            append(table)
            load = expert_load(table)
            chosen = chosen.add(load * (len(table) / len(load)), fill_value=0)  # share times tokens
            rows += len(table)
            status.update(f"routing: {counted(rows, 'row')}, the last of {part[-1].interval}")
    shown = Table(title="share of the bases that went to each expert")
    for heading in ("layer", *(str(expert) for expert in chosen.columns)):
        shown.add_column(heading, justify="right")
    for layer, tokens in chosen.iterrows():
        shown.add_row(str(layer), *(f"{count / (rows / len(chosen)):.3f}" for count in tokens))
    Console().print(shown)
    print(f"{counted(rows, 'row')} written: {out}", file=sys.stderr)
