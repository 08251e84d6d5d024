"""`genomoe evaluate`: bits per base of a run on its held-out contigs, or of any model on files, beside baselines."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from genomoe.commands.device import resolve_device
from genomoe.evaluation.pretraining import Report, evaluate_model, evaluate_run
from genomoe.files import write_text
from genomoe.genome.errors import GenoMoEError
from genomoe.training.run_directory import RunDirectory


def run(path: Path, *, data: Sequence[str], as_json: bool, window: int | None, stride: int | None, device: str) -> None:
    """Evaluate and print a table or JSON on stdout.

    Without `data`, `path` is a run, scored on its held-out contigs, and its report/ is written; with `data`, a run
    or a model folder, scored on those files, and nothing is written.
    """
    report = report_on(path, data=data, window=window, stride=stride, device=device)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_table(report, title="Scored" if data else "Held-out")


def report_on(
    path: Path, *, data: Sequence[str] = (), window: int | None = None, stride: int | None, device: str
) -> Report:
    """Evaluate; of a run's held-out contigs write report/evaluation.json, evaluation.csv and, with matplotlib, the
    loss curve.
    """
    run = RunDirectory(path)
    is_run = run.config_file.exists()
    if not data and not is_run and any((folder / "config.json").exists() for folder in (path, run.model)):
        raise GenoMoEError(f"{path} is a model without its run: name sequences to evaluate it on with --data.")
    with Console(stderr=True).status("evaluating") as status:
        options: dict[str, Any] = {
            "context": window,
            "stride": stride,
            "device": resolve_device(device),
            "progress": lambda part, done: status.update(f"evaluating: {part} {done:.0%}"),
        }
        if data and not is_run:
            return evaluate_model(path, data, **options)
        report = evaluate_run(path, data=data, **options)
    if not data:
        _write(run, report)
    return report


def _write(run: RunDirectory, report: Report) -> None:
    write_text(run.report / "evaluation.json", json.dumps(report.to_dict(), indent=2) + "\n")
    write_text(run.report / "evaluation.csv", report.table().to_csv(index=False))
    try:
        print(f"loss curve: {draw_loss_curve(run, report)}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"no loss curve: {error}", file=sys.stderr)


def draw_loss_curve(run: RunDirectory, report: Report) -> Path:
    """Draw report/loss_curve.png from metrics.csv, with the baselines as lines."""
    from genomoe.plot import plot_loss_curve

    assert report.markov is not None
    lines = {
        f"Markov, order {report.markov.order}": report.scores["markov"].bits_per_base,
        "uniform": report.scores["uniform"].bits_per_base,
    }
    axes = plot_loss_curve(pd.read_csv(run.metrics_file), baselines=lines)
    axes.set_title(f"final model, all held-out bases: {report.scores['model'].bits_per_base:.3f} bits per base")
    path = run.report / "loss_curve.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure: Any = axes.get_figure()
    figure.savefig(path, dpi=150)
    return path


def print_table(report: Report, *, title: str = "Held-out") -> None:
    """The table of a report on stdout, and in words how the model stands against the best baseline."""
    contigs = ", ".join(f"{name} ({length:,} bases)" for name, length in list(report.contigs.items())[:4])
    more = f" and {len(report.contigs) - 4} more" if len(report.contigs) > 4 else ""
    table = Table(title=f"{title}: {contigs}{more}")
    table.add_column("model")
    for heading in ("bits per base", "soft-mask weighted", "bases"):
        table.add_column(heading, justify="right")
    for row in report.table().itertuples():
        table.add_row(str(row.model), f"{row.bits_per_base:.4f}", f"{row.bits_per_base_weighted:.4f}", f"{row.bases:,}")
    Console().print(table)
    best, name = ("markov", "the best Markov model") if report.markov else ("composition", "the base composition")
    gap = report.scores[best].bits_per_base - report.scores["model"].bits_per_base
    print(f"The model is {abs(gap):.4f} bits {'better than' if gap > 0 else 'short of'} {name}.")
    if report.markov is None:
        print("Markov baselines need training data: give a run directory in place of a model folder.")
