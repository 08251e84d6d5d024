"""The report of a fine-tuning run: every way to predict the labels, on the same test rows, with its spread.

Rows of the table: the pretrained model, the same from random weights, the same head on one-hot bases, and
ridge regressions on one-hot bases and on k-mer counts, whose strength is chosen on the validation split.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from genomoe.evaluation.discrimination import METRICS, bootstrap
from genomoe.training.finetune import FineTuneResult, SeedResult, mean_and_spread, score_of, split_metrics
from genomoe.training.tasks import TaskConfig, TaskData

__all__ = ["comparison", "interval_table", "kmer_counts", "ridge_baselines"]

STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0)
LONGEST_ONE_HOT = 512
"""Aligned sequences longer than this get no one-hot ridge."""


def comparison(results: Mapping[str, FineTuneResult], data: TaskData, task: TaskConfig) -> pd.DataFrame:
    """One row for each result and metric on the test split: mean, spread (sample deviation over seeds),
    seeds.
    """
    metrics = {name: METRICS[name] for name in task.metrics}
    rows = []
    for name, result in results.items():
        for metric, values in split_metrics(result, data, metrics).items():
            mean, spread = mean_and_spread(values)
            rows.append(
                {
                    "predictor": name,
                    "metric": metric,
                    "mean": mean,
                    "spread": spread,
                    "seeds": len(values),
                    "trained_parameters": result.trained_parameters,
                }
            )
    return pd.DataFrame(rows)


def interval_table(result: FineTuneResult, data: TaskData, task: TaskConfig) -> pd.DataFrame:
    """Metrics of the mean prediction over seeds on the test split, 95 % bootstrap intervals over rows."""
    rows = data.where("test")
    mean = np.mean([score_of(seed.predictions) for seed in result.seeds], axis=0)[rows]
    median = float(np.median(data.labels[data.where("train")]))
    found = []
    for name in task.metrics:
        truth = data.labels[rows].astype(float)
        if name in ("auroc", "auprc", "mcc") and not data.classes:
            truth = (truth > median).astype(float)
        found.append({"metric": name, **bootstrap(METRICS[name], truth, mean, repeats=500)._asdict()})
    return pd.DataFrame(found)


def ridge_baselines(data: TaskData, task: TaskConfig, *, k: int = 5) -> dict[str, FineTuneResult]:
    """Ridge on one-hot bases (aligned sequences only) and on counts of all k-mers up to `k`.

    Classes are numbered for it, so for more than two classes there is none.
    """
    if len(data.classes) > 2:
        return {}
    sequences = [sequence[data.centre] for sequence in data.alt]
    lengths = {len(sequence) for sequence in sequences}
    designs = {f"{k}-mer ridge": kmer_counts(sequences, k)}
    if len(lengths) == 1 and max(lengths) <= LONGEST_ONE_HOT:
        letters = np.frombuffer(b"".join(sequences), dtype=np.uint8).reshape(len(sequences), -1)
        designs = {"one-hot ridge": _one_hot(letters)} | designs
    return {name: _ridge(design, data, task) for name, design in designs.items()}


def _ridge(design: np.ndarray, data: TaskData, task: TaskConfig) -> FineTuneResult:
    from torch import nn

    train, validation = data.where("train"), data.where("validation")
    labels = data.labels.astype(float)
    centre, x_mean = labels[train].mean(), design[train].mean(0, dtype=np.float64)
    x = design[train] - x_mean
    gram, moment = x.T @ x, x.T @ (labels[train] - centre)
    best = None
    for strength in STRENGTHS:
        weights = np.linalg.solve(gram + strength * np.eye(len(gram)), moment)
        predictions = (design - x_mean) @ weights + centre
        value = METRICS[task.metric](labels[validation], predictions[validation])
        if best is None or value > best[0]:
            best = (value, predictions)
    assert best is not None
    seed = SeedResult(seed=0, predictions=best[1], validation=best[0], epochs=1, best_epoch=0, history=[])
    return FineTuneResult(seeds=[seed], model=None, head=nn.Identity(), trained_parameters=design.shape[1] + 1)


def _one_hot(letters: np.ndarray) -> np.ndarray:
    return np.concatenate([letters == base for base in b"ACGT"], axis=1).astype(np.float32)


def kmer_counts(sequences: list[bytes], k: int) -> np.ndarray:
    """Counts of every word of 1 to k bases, [rows, 4 + ... + 4^k]; words with other letters do not count."""
    code = np.full(256, -1, dtype=np.int64)
    code[list(b"ACGT")] = range(4)
    counts = np.zeros((len(sequences), sum(4**size for size in range(1, k + 1))), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        digits = code[np.frombuffer(sequence, dtype=np.uint8)]
        words, start = np.zeros(len(digits), dtype=np.int64), 0
        valid = np.ones(len(digits), dtype=bool)
        for size in range(1, k + 1):
            shifted = digits[size - 1 :]
            words = words[: len(shifted)] * 4 + shifted
            valid = valid[: len(shifted)] & (shifted >= 0)
            counts[row, start : start + 4**size] = np.bincount(words[valid], minlength=4**size)
            start += 4**size
    return counts
