"""`genomoe mutagenesis`: every single-base change of an interval."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from genomoe.commands.device import resolve_device
from genomoe.commands.outputs import check_ending, write_table
from genomoe.files import replacing
from genomoe.inference.mutagenesis import as_matrix
from genomoe.inference.predictor import from_pretrained


def run(
    interval: str,
    *,
    reference: Path,
    model: Path,
    out: Path,
    device: str,
    dtype: str | None,
    window: int | None,
    **options: Any,
) -> None:
    """Write the table, or with .png its picture and the table beside it."""
    check_ending(out, ".tsv", ".csv", ".parquet", ".png")
    if window is not None:
        options["window"] = window
    predictor = from_pretrained(model, device=resolve_device(device), dtype=dtype)
    with Console(stderr=True).status(f"scoring every change of {interval}"):
        table = predictor.mutagenesis(interval, reference, **options)
    written = [out]
    if out.suffix == ".png":
        from genomoe.plot.variants import plot_mutagenesis

        with replacing(out) as temporary:
            axes = plot_mutagenesis(as_matrix(table))
            axes.set_title(f"{interval}, {options.get('score', 'llr')}")
            figure: Any = axes.get_figure()
            figure.savefig(temporary, dpi=150, format="png", bbox_inches="tight")
        written.append(out.with_suffix(".tsv"))
    write_table(table, written[-1])
    print(f"{len(table)} changes written: {', '.join(map(str, written))}", file=sys.stderr)
