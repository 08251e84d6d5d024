"""`genomoe routing`: which experts every base went to."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from genomoe.commands.device import resolve_device
from genomoe.commands.embed import read_records
from genomoe.commands.outputs import check_ending, write_table
from genomoe.inference.predictor import from_pretrained
from genomoe.inference.routing import expert_load
from genomoe.wording import counted


def run(sequences: Path, *, model: Path, out: Path, device: str, dtype: str | None) -> None:
    """Write a row for each base and layer, and print the load of the experts."""
    check_ending(out, ".tsv", ".csv", ".parquet")
    predictor = from_pretrained(model, device=resolve_device(device), dtype=dtype)
    names, records = read_records(sequences, predictor)
    with Console(stderr=True).status(f"routing {counted(len(records), 'sequence')}"):
        table = predictor.routing(records)
    table["sequence"] = [names[index] for index in table["sequence"]]
    write_table(table, out)
    load = expert_load(table)
    shown = Table(title="share of the bases that went to each expert")
    for heading in ("layer", *(str(expert) for expert in load.columns)):
        shown.add_column(heading, justify="right")
    for layer, shares in load.iterrows():
        shown.add_row(str(layer), *(f"{share:.3f}" for share in shares))
    Console().print(shown)
    print(f"{counted(len(table), 'row')} written: {out}", file=sys.stderr)
