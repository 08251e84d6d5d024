"""`genomoe finetune`: train on a labelled task, compare with what needs no pretraining, write a run
directory.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from genomoe.files import write_text
from genomoe.training.compose import compose_config
from genomoe.training.options import ConfigError
from genomoe.training.run_directory import RunDirectory, write_provenance

OWN_KEYS = ("task", "paths", "name", "pretrained", "control", "baselines", "device", "overwrite")


def run(overrides: Sequence[str], *, show_config: bool = False) -> None:
    """Compose finetune.yaml with `overrides`, train every seed, report."""
    config = compose_config("finetune", overrides, rename={"model": "pretrained"})
    if show_config:
        sys.stdout.write(OmegaConf.to_yaml(config))
        return
    console = Console(stderr=True)
    with console.status("starting") as status:

        def report(text: str) -> None:
            status.update(text)
            console.print(text, highlight=False)

        results = run_config(config, report=report)
    print_table(results["table"])
    print(f"written: {results['run']}")


def run_config(config: DictConfig, *, report: Any = None) -> dict[str, Any]:
    """Everything the command does but for printing; returns the comparison and where the run lies."""
    import lightning  # noqa: F401 - slow, and configuration mistakes are told before
    import torch

    from genomoe.commands.device import resolve_device
    from genomoe.evaluation.benchmarks import load_benchmark
    from genomoe.evaluation.discrimination import METRICS
    from genomoe.evaluation.finetuning import comparison, interval_table, ridge_baselines
    from genomoe.genome.alphabet import make_tokenizer
    from genomoe.genome.foreign_tokenizer import tokenizer_from_folder
    from genomoe.model.pretrained import from_pretrained
    from genomoe.model.transformer import GenoMoEModel
    from genomoe.training.finetune import FineTuneOptions, finetune, train_on_one_hot
    from genomoe.training.finetuned import save_finetuned
    from genomoe.training.tasks import TaskConfig, build_task, read_table

    tell = report or (lambda text: None)
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    task = TaskConfig.from_config(values["task"], where="task")
    for name in (task.metric, *task.metrics):
        if name not in METRICS:
            raise ConfigError(f"task.metrics: {name} is not allowed: it must be one of {', '.join(METRICS)}.")
    options = FineTuneOptions.from_config({key: value for key, value in values.items() if key not in OWN_KEYS})
    target = _open(RunDirectory(Path(config.paths.run_dir)), overwrite=config.overwrite)
    device = resolve_device(config.device)
    folder = Path(config.pretrained)
    folder = folder / "model" if (folder / "model" / "config.json").is_file() else folder
    _, spec = from_pretrained(folder, "cpu")
    tokenizer = make_tokenizer(spec) if spec is not None else tokenizer_from_folder(folder)
    table = load_benchmark(task.layout, task.table).table if task.layout else read_table(task.table)
    data = build_task(task, table)
    if data.classes and len(data.classes) > 2 and not set(task.metrics) <= {"spearman", "pearson"}:
        raise ConfigError(f"task.metrics: {len(data.classes)} classes; auroc, auprc and mcc are for two.")
    accelerator = "gpu" if device.startswith("cuda") else "cpu"

    def pretrained() -> GenoMoEModel:
        return from_pretrained(folder, device, torch.float32)[0]

    def random() -> GenoMoEModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return GenoMoEModel(pretrained().config, device=device)

    metric = METRICS[task.metric]
    given: dict[str, Any] = {"metric": metric, "accelerator": accelerator}
    tell(f"pretrained, {options.mode}")
    results = {"pretrained": finetune(data, task, options, pretrained, tokenizer, report=tell, **given)}
    if config.control:
        tell(f"random weights, {options.mode}")
        results["random weights"] = finetune(data, task, options, random, tokenizer, report=tell, **given)
    if config.baselines:
        if tokenizer.bases_per_token == 1:
            tell("the same head on one-hot bases")
            results["head on one-hot bases"] = train_on_one_hot(data, options, tokenizer, **given)
        tell("ridge regressions")
        results |= ridge_baselines(data, task)
    compared, intervals = comparison(results, data, task), interval_table(results["pretrained"], data, task)
    write_provenance(target, config)
    best = results["pretrained"]
    card = {"fine-tuned from": str(folder), "task": task.name, "mode": options.mode}
    save_finetuned(target.path, best, task, options, data.classes, tokenizer, card=card)
    _write(
        target,
        results,
        data,
        compared,
        intervals,
        {"task": dataclasses.asdict(task), "dropped": data.dropped},
    )
    return {"table": compared, "intervals": intervals, "run": target.path, "results": results, "data": data}


def print_table(compared: pd.DataFrame) -> None:
    """Predictors by metrics on stdout: mean and spread over seeds."""
    metrics = list(dict.fromkeys(compared["metric"]))
    shown = Table(title="test split, mean (spread over seeds)")
    shown.add_column("predictor")
    for heading in (*metrics, "seeds", "trained parameters"):
        shown.add_column(heading, justify="right")
    for name, part in compared.groupby("predictor", sort=False):
        rows = part.set_index("metric")
        cells = [
            f"{rows.loc[m, 'mean']:.4f}" + (f" ({rows.loc[m, 'spread']:.4f})" if rows.loc[m, "seeds"] > 1 else "")
            for m in metrics
        ]
        first = part.iloc[0]
        shown.add_row(str(name), *cells, str(first["seeds"]), f"{first['trained_parameters']:,}")
    Console().print(shown)


def _open(run: RunDirectory, *, overwrite: bool) -> RunDirectory:
    if run.finished and not overwrite:
        raise ConfigError(f"{run.path} already holds a finished run; give another paths.run_dir, or overwrite=true.")
    if run.path.exists() and not run.path.is_dir():
        raise ConfigError(f"paths.run_dir={run.path} is a file, not a folder.")
    return run


def _write(
    run: RunDirectory,
    results: dict[str, Any],
    data: Any,
    compared: pd.DataFrame,
    intervals: pd.DataFrame,
    facts: dict[str, Any],
) -> None:
    history = [
        {"predictor": name, "seed": seed.seed, **row}
        for name, result in results.items()
        for seed in result.seeds
        for row in seed.history
    ]
    write_text(run.metrics_file, pd.DataFrame(history).to_csv(index=False))
    from genomoe.training.finetune import score_of

    rows = data.where("test")
    predictions = pd.DataFrame({"row": data.rows[rows], "label": data.labels[rows]})
    for name, result in results.items():
        for seed in result.seeds:
            predictions[f"{name} {seed.seed}"] = score_of(seed.predictions)[rows]
    run.report.mkdir(parents=True, exist_ok=True)
    write_text(run.report / "predictions.csv", predictions.to_csv(index=False, float_format="%.6g"))
    write_text(run.report / "finetune.csv", compared.to_csv(index=False))
    splits = {split: int(np.sum(data.split == split)) for split in ("train", "validation", "test")}
    report = {
        **facts,
        "rows": splits,
        "comparison": compared.to_dict("records"),
        "pretrained_mean_of_seeds": intervals.to_dict("records"),
    }
    write_text(run.report / "finetune.json", json.dumps(report, indent=2, default=str) + "\n")
