"""`genomoe evaluate --task`: a labelled variant set, scored and compared with baselines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from genomoe.commands.device import resolve_device
from genomoe.commands.outputs import write_table
from genomoe.evaluation.benchmarks import LAYOUTS, LabelledSet, load_benchmark
from genomoe.evaluation.variant_effects import VariantReport, evaluate_variants
from genomoe.files import write_text
from genomoe.genome.annotation import read_annotation
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.genome.variant_files import TableColumns
from genomoe.inference.predictor import from_pretrained


def run(
    model: Path,
    *,
    task: str,
    table: Path | None,
    reference: Path | None,
    annotation: Path | None,
    codon_table: int,
    out: Path | None,
    as_json: bool,
    device: str,
    **options: Any,
) -> None:
    """Evaluate, write report.html, report.json and rows.tsv into `out`, print the table or JSON."""
    if table is None or reference is None:
        raise GenoMoEError("--task needs the labelled file or folder (--table) and the genome (--reference).")
    labelled = load_labelled(task, table)
    if labelled.is_sequences:
        raise GenoMoEError(
            f"{task} is a set of sequences, not of variants: learn it with genomoe finetune task=sequences."
        )
    predictor = from_pretrained(model, device=resolve_device(device))
    features = read_annotation(annotation, table=codon_table) if annotation is not None else None
    given = {name: value for name, value in options.items() if value is not None}
    with Console(stderr=True).status(f"scoring {len(labelled.table):,} variants"):
        report = evaluate_variants(predictor, labelled, Reference(reference), annotation=features, **given)
    out = out or _beside(model) / f"task-{task}"
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "report.json", json.dumps(report.to_dict(), indent=2) + "\n")
    write_table(report.rows, out / "rows.tsv")
    try:
        from genomoe.evaluation.variant_html import html_report

        write_text(out / "report.html", html_report(report))
    except ModuleNotFoundError as error:
        print(f"no report.html: {error}", file=sys.stderr)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(report)
    print(f"written: {out}", file=sys.stderr)


def load_labelled(task: str, path: Path) -> LabelledSet:
    """By layout; `table` is a TSV, CSV or Parquet with contig, position, ref, alt, label and perhaps class, group."""
    if task in LAYOUTS:
        return load_benchmark(task, path)
    if task != "table":
        raise GenoMoEError(f"--task {task} is not known: it is table, {', '.join(LAYOUTS)}.")
    if not path.is_file():
        raise GenoMoEError(f"There is no table {path}.")
    name = path.name.lower()
    frame = (
        pd.read_parquet(path) if name.endswith(".parquet") else pd.read_csv(path, sep="," if ".csv" in name else "\t")
    )
    columns = TableColumns.find(list(frame.columns), path)
    if "label" not in frame:
        raise GenoMoEError(f"{path} has no column label; it has {', '.join(map(str, frame.columns))}.")
    names = list(frame.columns)
    roles = {"contig": columns.contig, "position": columns.position, "ref": columns.ref, "alt": columns.alt}
    usual = frame.rename(columns={names[index]: role for role, index in roles.items()})
    for column in ("class", "group"):
        usual[column] = usual[column].fillna("").astype(str) if column in usual else ""
    labelled = usual["label"].notna()
    dropped = {"no label": int((~labelled).sum())} if not labelled.all() else {}
    return LabelledSet(name=path.name, table=usual[labelled].reset_index(drop=True), dropped=dropped)


def print_report(report: VariantReport) -> None:
    """Metrics with intervals, the means within groupings, and the warnings."""
    metrics = list(dict.fromkeys(report.overall["metric"]))
    shown = Table(title=f"{report.name}: {len(report.rows):,} variants, 95 % bootstrap intervals")
    shown.add_column("score")
    groupings = list(dict.fromkeys(report.within_mean["grouping"]))
    for heading in (*metrics, *(f"{metrics[0]} within {grouping}" for grouping in groupings)):
        shown.add_column(heading, justify="right")
    means = report.within_mean.set_index(["grouping", "score"])["value"]
    for name, part in report.overall.groupby("score", sort=False):
        by_metric = part.set_index("metric")
        cells = [
            f"{by_metric.loc[m, 'value']:.3f} ({by_metric.loc[m, 'low']:.3f}-{by_metric.loc[m, 'high']:.3f})"
            for m in metrics
        ]
        shown.add_row(str(name), *cells, *(f"{means[grouping, name]:.3f}" for grouping in groupings))
    Console(width=160).print(shown)
    for text in report.warnings:
        print(f"warning: {text}")


def _beside(model: Path) -> Path:
    """The report folder of the run a model folder belongs to."""
    run = model.parent if model.name == "model" else model
    return run / "report"
