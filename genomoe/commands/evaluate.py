"""`genomoe evaluate`: bits per base of a run on its held-out contigs, beside the baselines."""

import json
import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from genomoe.commands.device import resolve_device
from genomoe.evaluation.pretraining import Report, evaluate_run
from genomoe.files import write_text
from genomoe.training.run_directory import RunDirectory


def run(run_dir: Path, *, as_json: bool, stride: int | None, device: str) -> None:
    """Evaluate `run_dir`, write report/, print a table or JSON on stdout."""
    report = report_on(run_dir, stride=stride, device=device)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_table(report)


def report_on(run_dir: Path, *, stride: int | None, device: str) -> Report:
    """Evaluate and write report/evaluation.json, report/evaluation.csv and, with matplotlib, the loss curve."""
    console = Console(stderr=True)
    with console.status("evaluating") as status:
        report = evaluate_run(
            run_dir,
            stride=stride,
            device=resolve_device(device),
            progress=lambda part, done: status.update(f"evaluating: {part} {done:.0%}"),
        )
    run = RunDirectory(run_dir)
    write_text(run.report / "evaluation.json", json.dumps(report.to_dict(), indent=2) + "\n")
    write_text(run.report / "evaluation.csv", report.table().to_csv(index=False))
    try:
        path = draw_loss_curve(run, report)
        print(f"loss curve: {path}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"no loss curve: {error}", file=sys.stderr)
    return report


def draw_loss_curve(run: RunDirectory, report: Report) -> Path:
    """Draw report/loss_curve.png from metrics.csv, with the baselines as lines."""
    from genomoe.plot import plot_loss_curve

    lines = {
        f"Markov, order {report.markov_order}": report.scores["markov"].bits_per_base,
        "uniform": report.scores["uniform"].bits_per_base,
    }
    axes = plot_loss_curve(pd.read_csv(run.metrics_file), baselines=lines)
    axes.set_title(f"final model, all held-out bases: {report.scores['model'].bits_per_base:.3f} bits per base")
    path = run.report / "loss_curve.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    axes.get_figure().savefig(path, dpi=150)  # type: ignore[union-attr]
    return path


def print_table(report: Report) -> None:
    """The table of a report on stdout, and in words how the model stands against the best baseline."""
    contigs = ", ".join(f"{name} ({length:,} bases)" for name, length in list(report.contigs.items())[:4])
    more = f" and {len(report.contigs) - 4} more" if len(report.contigs) > 4 else ""
    table = Table(title=f"Held-out: {contigs}{more}")
    table.add_column("model")
    for heading in ("bits per base", "soft-mask weighted", "bases"):
        table.add_column(heading, justify="right")
    for row in report.table().itertuples():
        table.add_row(row.model, f"{row.bits_per_base:.4f}", f"{row.bits_per_base_weighted:.4f}", f"{row.bases:,}")
    Console().print(table)
    gap = report.scores["markov"].bits_per_base - report.scores["model"].bits_per_base
    relation = f"{gap:.4f} bits better than" if gap > 0 else f"{-gap:.4f} bits short of"
    print(f"The model is {relation} the best Markov model.")
