"""`genomoe bench`: measurements that print a table and write the JSON which documents quote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

STEP_COLUMNS = (
    "case", "implementation", "precision", "save", "activation", "tokens_per_s", "mfu", "peak_gib",
    "predicted_peak_gib", "saved_bytes_per_token_layer", "error",
)  # fmt: skip


LAYER_COLUMNS = (
    "case", "implementation", "precision", "save", "chunk_tokens", "forward_ms", "forward_backward_ms", "tflops",
    "saved_bytes_per_token", "peak_bytes_per_token", "error_out", "error_dx", "error_dw_up", "error_dw_down",
    "error_dscores", "error",
)  # fmt: skip


def run_layers(
    *, out: Path | None, cases: Sequence[str], only: Sequence[str], repeats: int, limit_s: int, prepare: bool
) -> None:
    """Measure one MoE layer by every implementation that is installed."""
    from genomoe.bench import layer

    _cuda_or_error("auto")
    console = Console(stderr=True)
    rows = layer.run_layers(
        only_cases=cases, only=only, repeats=repeats, limit_s=limit_s, prepare=console.print if prepare else None,
        report=_reporter(out, LAYER_COLUMNS, console),
    )  # fmt: skip
    Console(width=220).print(rows_table(rows, LAYER_COLUMNS, "genomoe bench layer"))
    if out is not None:
        console.print(f"written: {out}")


SCORING_COLUMNS = (
    "case", "implementation", "precision", "experts", "variants", "seconds", "variants_per_s",
    "speedup_over_huggingface_ref_and_alt", "speedup_over_huggingface_ref_once", "largest_score_difference",
    "largest_score_difference_float32", "rms_difference_from_float64", "rank_correlation_with_float64", "error",
)  # fmt: skip


def run_scoring(
    *, out: Path | None, only: Sequence[str], time_budget: float | None, device: str, precisions: Sequence[str]
) -> None:
    """Measure variants per second of scoring."""
    import fnmatch

    from genomoe.bench import scoring
    from genomoe.bench.scoring_cases import scoring_cases
    from genomoe.commands.device import resolve_device

    device = resolve_device(device)
    cases = [
        case
        for case in scoring_cases("cpu" if device == "cpu" else "cuda")
        if not only or any(fnmatch.fnmatch(case.name, pattern) for pattern in only)
    ]
    console = Console(stderr=True)
    report = _reporter(out, SCORING_COLUMNS, console)
    repeats = 3 if device == "cpu" else 2
    rows = scoring.run_scoring(
        device, cases=cases, repeats=repeats, precisions=precisions, time_budget=time_budget, report=report
    )
    Console(width=220).print(rows_table(rows, SCORING_COLUMNS, "genomoe bench scoring"))
    if out is not None:
        console.print(f"written: {out}")


def run_steps(
    which: str, *, out: Path | None, only: Sequence[str], time_budget: float | None, device: str, list_only: bool
) -> None:
    """Measure whole training steps: `which` is "step" or "context"."""
    from genomoe.bench.context import context_cases
    from genomoe.bench.step import run_cases, step_cases

    cases = {"step": step_cases, "context": context_cases}[which]()
    if list_only:
        for case in cases:
            print(case.name)
        return
    device = _cuda_or_error(device)
    console = Console(stderr=True)
    report = _reporter(out, STEP_COLUMNS, console)
    rows = run_cases(cases, device=device, only=only, time_budget=time_budget, report=report)
    Console(width=200).print(rows_table(rows, STEP_COLUMNS, f"genomoe bench {which}"))
    if out is not None:
        console.print(f"written: {out}")


PRECISION_COLUMNS = (
    "kind", "implementation", "precision", "save", "seed", "loss_bits_per_base", "held_out_bits_per_base", "error",
)  # fmt: skip
VERDICT_COLUMNS = (
    "implementation", "precision", "save", "seeds", "difference_bits_per_base", "standard_error_bits_per_base",
    "within_two_standard_errors", "held_out_difference_bits_per_base", "held_out_standard_error_bits_per_base",
    "held_out_within_two_standard_errors",
)  # fmt: skip


def run_precision(
    *, out: Path | None, plot: Path | None, steps: int, seeds: int, small: bool, device: str,
    sources: dict[str, Any],
) -> None:  # fmt: skip
    """Train the same small model by each precision of the experts, from several seeds."""
    from genomoe.bench.precision import PrecisionOptions, Training, run_trainings
    from genomoe.commands.device import resolve_device

    console = Console(stderr=True)

    def report(training: Training, error: str | None) -> None:
        console.print(f"{training.precision}, seed {training.seed}: {error or 'trained'}", highlight=False)

    make = PrecisionOptions.small if small else PrecisionOptions
    options = make(steps=steps, seeds=seeds, **sources)
    with console.status(f"{len(options.trainings)} trainings of {steps} steps at the same time"):
        rows = run_trainings(options, device=resolve_device(device), report=report)
    if out is not None:
        _write(out, rows)
        console.print(f"written: {out}")
    if plot is not None:
        import pandas as pd

        from genomoe.plot import plot_precision

        curves, _ = plot_precision(pd.DataFrame(rows))
        plot.parent.mkdir(parents=True, exist_ok=True)
        figure: Any = curves.get_figure()
        figure.savefig(plot, dpi=150)
        console.print(f"written: {plot}")
    for kind, columns in (("summary", PRECISION_COLUMNS), ("verdict", VERDICT_COLUMNS)):
        short = [row for row in rows if row["kind"] == kind]
        Console(width=200).print(rows_table(short, columns, f"genomoe bench precision: {kind}"))


LOADER_COLUMNS = (
    "case", "implementation", "workers", "mb_per_s", "mb_per_cpu_s", "mb_per_loader_cpu_s", "mb_per_main_cpu_s",
    "times_pyfaidx", "times_pysam", "times_pysam_bgzip", "times_biopython_in_memory", "times_numpy_memory_map",
    "neighbour_distance_part_of_corpus", "neighbours_in_one_block",
)  # fmt: skip


def run_loader(
    *, out: Path | None, as_json: bool, bases: int, windows: Sequence[int], workers: Sequence[int], repeats: int,
    seconds: float,
) -> None:  # fmt: skip
    """Measure the data loaders beside bare libraries, on a made-up genome in a temporary folder."""
    import json
    import tempfile

    from genomoe.bench.loader import LoaderOptions, measure_loaders
    from genomoe.bench.report import envelope

    options = LoaderOptions(
        bases=bases, windows=tuple(windows), workers=tuple(workers), repeats=repeats, seconds=seconds
    )
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="genomoe-bench-") as folder:
        rows = measure_loaders(Path(folder), options, lambda text: console.print(text, highlight=False))
    if out is not None:
        _write(out, rows)
        console.print(f"written: {out}")
    if as_json:
        print(json.dumps({**envelope(), "rows": rows}, indent=2))
    else:
        Console(width=240).print(rows_table(rows, LOADER_COLUMNS, "genomoe bench loader"))


def _reporter(out: Path | None, columns: Sequence[str], console: Console) -> Callable[[list[dict[str, Any]]], None]:
    """Prints the newest row and rewrites the result file, so that an interrupted run keeps what it measured."""

    def report(rows: list[dict[str, Any]]) -> None:
        if out is not None:
            _write(out, rows)
        figures = {name: rows[-1][name] for name in columns if rows[-1].get(name) is not None}
        console.print(" ".join(f"{name}={value}" for name, value in figures.items()), highlight=False)

    return report


def rows_table(rows: Sequence[dict[str, Any]], columns: Sequence[str], title: str) -> Table:
    """Rows as a table of the named columns, those left out that no row has."""
    table = Table(title=title)
    used = [name for name in columns if any(row.get(name) is not None for row in rows)]
    for name in used:
        table.add_column(name, justify="right" if isinstance(_first(rows, name), int | float) else "left")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in used))
    return table


def _first(rows: Sequence[dict[str, Any]], name: str) -> object:
    return next(row[name] for row in rows if row.get(name) is not None)


def _cuda_or_error(device: str) -> str:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        raise ValueError("these measurements need a CUDA device, and this machine has none that PyTorch can use")
    return device


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    from genomoe.bench.report import write_result

    write_result(out, rows)
