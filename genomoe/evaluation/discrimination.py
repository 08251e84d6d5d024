"""How well a score tells labels apart: ranking metrics, bootstrap intervals, and whether a grouping explains
it.

Everything is plain numpy on one-dimensional arrays of equal length; rows with a missing score or label are
left out by the caller, who counts them. Ties get their mean rank throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from genomoe.genome.errors import GenoMoEError

__all__ = [
    "METRICS",
    "Estimate",
    "auprc",
    "auroc",
    "bootstrap",
    "calibration",
    "grouping_auroc",
    "matthews",
    "pearson",
    "precision_recall_curve",
    "roc_curve",
    "spearman",
    "within_groups",
]

Metric = Callable[[np.ndarray, np.ndarray], float]


class Estimate(NamedTuple):
    """A metric with its percentile bootstrap interval."""

    value: float
    low: float
    high: float


def rank(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, ties at their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def auroc(labels: np.ndarray, scores: np.ndarray) -> float:
    """P(score of a positive > score of a negative) + P(equal)/2; NaN unless both classes occur."""
    positive = np.asarray(labels) > 0
    n_pos, n_neg = int(positive.sum()), int((~positive).sum())
    if not n_pos or not n_neg:
        return float("nan")
    return float((rank(scores)[positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


def auprc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Average precision: sum over thresholds of (recall step) x precision; a random score has the positive
    share.
    """
    precision, recall = precision_recall_curve(labels, scores)
    return float(np.sum(np.diff(recall, prepend=0.0) * precision)) if len(precision) else float("nan")


def precision_recall_curve(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision and recall at every distinct threshold, from the highest score down; empty without
    positives.
    """
    positive, total = _cumulative(labels, scores)
    if not len(positive) or not positive[-1]:
        return np.zeros(0), np.zeros(0)
    return positive / total, positive / positive[-1]


def roc_curve(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False and true positive rates at every distinct threshold, from (0, 0) to (1, 1)."""
    positive, total = _cumulative(labels, scores)
    negative = total - positive
    if not len(positive) or not positive[-1] or not negative[-1]:
        return np.zeros(0), np.zeros(0)
    return np.append(0.0, negative / negative[-1]), np.append(0.0, positive / positive[-1])


def _cumulative(labels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positives and rows at or above each distinct score, from the highest down."""
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.append(ordered[1:] != ordered[:-1], True) if len(ordered) else np.zeros(0, dtype=bool)
    return np.cumsum(np.asarray(labels)[order] > 0)[last], (np.arange(len(ordered)) + 1)[last]


def pearson(labels: np.ndarray, scores: np.ndarray) -> float:
    """Linear correlation; NaN where one of both does not vary."""
    a, b = labels - np.mean(labels), scores - np.mean(scores)
    scale = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale > 0 else float("nan")


def spearman(labels: np.ndarray, scores: np.ndarray) -> float:
    """Linear correlation of the ranks."""
    return pearson(rank(np.asarray(labels)), rank(np.asarray(scores)))


def matthews(labels: np.ndarray, scores: np.ndarray) -> float:
    """Matthews correlation of labels and scores > 0.5."""
    return pearson((np.asarray(labels) > 0).astype(float), (np.asarray(scores) > 0.5).astype(float))


METRICS: dict[str, Metric] = {
    "auroc": auroc,
    "auprc": auprc,
    "spearman": spearman,
    "pearson": pearson,
    "mcc": matthews,
}


def bootstrap(
    metric: Metric,
    labels: np.ndarray,
    scores: np.ndarray,
    *,
    groups: np.ndarray | None = None,
    repeats: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """A metric and its percentile interval over resampled rows, or over resampled groups of rows.

    Args:
        groups: rows of one group (a gene, a locus) are drawn together, as they are not independent.
        repeats: resamples; those in which the metric is undefined are left out.
        level: coverage of the interval.
        seed: of a generator of its own.
    """
    labels, scores = np.asarray(labels, dtype=float), np.asarray(scores, dtype=float)
    value = metric(labels, scores)
    random = np.random.default_rng(seed)
    blocks = None
    if groups is not None:
        _, inverse = np.unique(np.asarray(groups).astype(str), return_inverse=True)
        blocks = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    found = []
    for _ in range(repeats):
        if blocks is None:
            rows = random.integers(len(labels), size=len(labels))
        else:
            rows = np.concatenate([blocks[i] for i in random.integers(len(blocks), size=len(blocks))])
        again = metric(labels[rows], scores[rows])
        if np.isfinite(again):
            found.append(again)
    if not found:
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high))


def within_groups(
    metric: Metric, labels: np.ndarray, scores: np.ndarray, groups: np.ndarray, *, fewest: int = 5
) -> tuple[pd.DataFrame, float]:
    """The metric inside each group and its mean weighted by rows: what is left when the grouping is known.

    Groups with fewer than `fewest` rows of the rarer label (or rows, for a continuous label) are listed
    without a value. Columns: group, rows, positives, value.
    """
    frame = pd.DataFrame({"label": labels, "score": scores, "group": np.asarray(groups).astype(str)})
    binary = set(np.unique(frame["label"])) <= {0.0, 1.0}
    rows = []
    for name, part in frame.groupby("group"):
        positives = int((part["label"] > 0).sum())
        enough = min(positives, len(part) - positives) if binary else len(part)
        value = metric(part["label"].to_numpy(), part["score"].to_numpy()) if enough >= fewest else float("nan")
        rows.append((name, len(part), positives, value))
    table = pd.DataFrame(rows, columns=["group", "rows", "positives", "value"])
    known = table[table["value"].notna()]
    mean = float(np.average(known["value"], weights=known["rows"])) if len(known) else float("nan")
    return table, mean


def grouping_auroc(labels: np.ndarray, groups: np.ndarray, *, folds: int = 5, seed: int = 0) -> float:
    """AUROC of the share of positives of each row's group, learnt on other rows: what the grouping alone
    tells.

    Rows are dealt into folds; a row's score comes from the other folds, drawn towards the overall share by
    two rows' weight. 0.5: the grouping tells nothing.
    """
    label = (np.asarray(labels) > 0).astype(float)
    _, group = np.unique(np.asarray(groups).astype(str), return_inverse=True)
    fold = np.random.default_rng(seed).permutation(len(label)) % folds
    scores = np.zeros(len(label))
    for held_out in range(folds):
        rest = fold != held_out
        size = np.bincount(group[rest], minlength=group.max() + 1)
        positives = np.bincount(group[rest], weights=label[rest], minlength=group.max() + 1)
        scores[~rest] = ((positives + 2 * label[rest].mean()) / (size + 2))[group[~rest]]
    return auroc(label, scores)


def calibration(labels: np.ndarray, probabilities: np.ndarray, bins: int = 10) -> pd.DataFrame:
    """Mean prediction, observed share and rows in `bins` bins of equally many rows."""
    if len(labels) == 0:
        raise GenoMoEError("There is nothing to calibrate: no row has both a label and a prediction.")
    order = np.argsort(probabilities, kind="stable")
    parts = [part for part in np.array_split(order, min(bins, len(order))) if len(part)]
    return pd.DataFrame(
        {
            "predicted": [float(np.mean(probabilities[part])) for part in parts],
            "observed": [float(np.mean(labels[part])) for part in parts],
            "rows": [len(part) for part in parts],
        }
    )


def summary(
    labels: np.ndarray, scores: Mapping[str, np.ndarray], metrics: list[str], **options: object
) -> pd.DataFrame:
    """One row for each named score and metric: value, low, high, on exactly the same rows for all."""
    rows = []
    for name, values in scores.items():
        for metric in metrics:
            if metric not in METRICS:
                raise GenoMoEError(f"Unknown metric '{metric}': it is one of {', '.join(METRICS)}.")
            estimate = bootstrap(METRICS[metric], labels, values, **options)  # type: ignore[arg-type]
            rows.append((name, metric, *estimate))
    return pd.DataFrame(rows, columns=["score", "metric", "value", "low", "high"])
