"""How well scores tell labelled variants apart, honestly: beside baselines, within classes, and with warnings.

All figures of a report are on the same rows: those that have both a label and a score. A baseline that learns from
labels is always applied to rows it did not see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from genomoe.evaluation.baselines import MarkovModel, encode
from genomoe.evaluation.benchmarks import LabelledSet
from genomoe.evaluation.discrimination import METRICS, Estimate, bootstrap, grouping_auroc, within_groups
from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.annotation import Annotation
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.variant_files import InputRow
from genomoe.genome.variants import CentredWindow, SequenceSource, haplotypes
from genomoe.inference.predictor import Predictor
from genomoe.inference.scoring import VariantScorer

__all__ = ["VariantReport", "evaluate_variants", "probability"]

SIGN = {"llr": -1.0, "marginal": -1.0, "embedding": 1.0, "jsd": 1.0}
"""By which a score is multiplied so that larger means a larger effect."""
FOLDS = 5
MARKOV_BASES = 5_000_000
EXPLAINED = 0.05
"""A grouping whose own AUROC is this close to the model's, or above it, is warned of."""
CHANCE = 0.55
FEWEST = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantReport:
    """What was evaluated, and every figure of it."""

    name: str
    settings: Mapping[str, Any]
    rows: pd.DataFrame
    """The rows that count: keys, label, class, group, and every predictor's value (larger: larger effect)."""
    left_out: Mapping[str, int]
    overall: pd.DataFrame
    """score, metric, value, low, high."""
    within: pd.DataFrame
    """grouping, group, rows, positives, score, value: AUROC (or Spearman) inside each class and group."""
    within_mean: pd.DataFrame
    """grouping, score, value: its mean weighted by rows."""
    groupings: Mapping[str, float]
    """AUROC of each grouping alone, learnt on other rows."""
    warnings: tuple[str, ...]

    @property
    def binary(self) -> bool:
        return set(self.rows["label"].unique()) <= {0, 1}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the rows."""
        return {
            "name": self.name,
            "settings": dict(self.settings),
            "rows": len(self.rows),
            "positives": int((self.rows["label"] > 0).sum()) if self.binary else None,
            "left_out": dict(self.left_out),
            "overall": self.overall.to_dict("records"),
            "within": self.within.to_dict("records"),
            "within_mean": self.within_mean.to_dict("records"),
            "groupings": dict(self.groupings),
            "warnings": list(self.warnings),
        }


def evaluate_variants(
    predictor: Predictor,
    labelled: LabelledSet,
    reference: SequenceSource,
    *,
    annotation: Annotation | None = None,
    repeats: int = 500,
    **options: Any,
) -> VariantReport:
    """Scores a labelled set and everything it is to be compared with.

    Args:
        annotation: gives consequence classes; without it those of the set are used.
        repeats: bootstrap resamples, drawn by group where the set has groups.
        options: of scoring; mismatches and unknown contigs are left out and counted unless said otherwise.

    Raises GenoMoEError if fewer than ten rows can be used.
    """
    options = {"ref_mismatch": "skip", "unknown_contig": "skip"} | options
    scorer = predictor.scorer(reference, **options)
    table = labelled.table
    columns = (table[name].tolist() for name in ("contig", "position", "ref", "alt"))
    rows = [
        InputRow(number=i, contig=str(contig), position=int(position) - 1, id=".", ref=ref, alts=(alt,), fields=())
        for i, (contig, position, ref, alt) in enumerate(zip(*columns, strict=True), start=1)
    ]
    checked = [scorer.check(row, row.alts[0], labelled.name) for row in rows]
    usable = np.array([variant is not None and status.has_score for variant, status in checked])
    if usable.sum() < FEWEST:
        raise GenoMoEError(f"Only {int(usable.sum())} rows of {labelled.name} can be scored; ten are needed.")
    left_out = dict(labelled.dropped)
    for (_, status), kept in zip(checked, usable, strict=True):
        if not kept:
            left_out[status.value] = left_out.get(status.value, 0) + 1
    variants = [variant for variant, _ in checked if variant is not None]
    kept = table[usable].reset_index(drop=True)
    kept["model"] = SIGN[scorer.options.score] * scorer.score_variants(variants)
    if annotation is not None:
        kept["class"] = [annotation.effect(variant, reference).consequence.value for variant in variants]
    names = ["model", *_add_baselines(kept, variants, scorer)]
    binary = set(kept["label"].unique()) <= {0, 1}
    metrics = ["auroc", "auprc"] if binary else ["spearman", "pearson"]
    labels = kept["label"].to_numpy(dtype=float)
    groups = kept["group"].to_numpy() if kept["group"].nunique() > FEWEST else None
    overall = pd.DataFrame(
        [
            (name, metric, *bootstrap(METRICS[metric], labels, kept[name].to_numpy(), groups=groups, repeats=repeats))
            for name in names
            for metric in metrics
        ],
        columns=["score", "metric", *Estimate._fields],
    )
    within, means = _within(kept, names, binary)
    groupings = {
        name: grouping_auroc(labels, kept[name].to_numpy())
        for name in ("class", "group")
        if binary and kept[name].nunique() > 1
    }
    settings = {"model": predictor.name, "score": scorer.options.description, "metric_within": metrics[0]}
    return VariantReport(
        name=labelled.name,
        settings=settings,
        rows=kept,
        left_out=left_out,
        overall=overall,
        within=within,
        within_mean=means,
        groupings=groupings,
        warnings=tuple(_warnings(overall, means, groupings, metrics[0])),
    )


def _add_baselines(kept: pd.DataFrame, variants: list[Variant], scorer: VariantScorer) -> list[str]:
    """Adds a column for each baseline, larger meaning a larger effect; returns their names."""
    labels = kept["label"].to_numpy(dtype=float)
    reference = scorer.reference
    around = [_context(variant, reference) for variant in variants]
    change = np.array([f"{variant.ref}>{variant.alt}" for variant in variants])
    kept["allele change"] = _out_of_fold_mean(labels, change)
    kept["trinucleotide change"] = _out_of_fold_mean(
        labels, np.array([f"{context}>{variant.alt}" for context, variant in zip(around, variants, strict=True)])
    )
    kept["k-mer regression"] = _out_of_fold_kmers(labels, kept["group"].to_numpy(), variants, scorer)
    kept["Markov likelihood ratio"] = _markov(variants, scorer)
    names = ["allele change", "trinucleotide change", "k-mer regression", "Markov likelihood ratio"]
    for column in kept.columns:
        lower = str(column).lower()
        if lower.startswith(("phylop", "phastcons", "cadd", "gerp")) and pd.api.types.is_numeric_dtype(kept[column]):
            kept[column] = kept[column].fillna(kept[column].median())
            names.append(str(column))
    return names


def _context(variant: Variant, reference: SequenceSource) -> str:
    """REF with the base on each side, N beyond the contig."""
    length = reference.contigs[variant.contig]
    start, end = variant.position - 1, variant.position + len(variant.ref) + 1
    inside = reference.fetch(Interval(variant.contig, max(0, start), min(length, end))).decode("ascii").upper()
    return "N" * (start < 0) + inside + "N" * (end > length)


def _folds(groups: np.ndarray) -> np.ndarray:
    """Rows of a group in one fold, where there are groups."""
    _, inverse = np.unique(groups.astype(str), return_inverse=True)
    if inverse.max() < FOLDS:
        inverse = np.arange(len(groups))
    return np.random.default_rng(0).permutation(inverse.max() + 1)[inverse] % FOLDS


def _out_of_fold_mean(labels: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Mean label of the rows with the same key in the other folds, drawn to the overall mean by five rows' weight."""
    _, key = np.unique(keys, return_inverse=True)
    fold = _folds(np.arange(len(labels)))
    out = np.zeros(len(labels))
    for held_out in range(FOLDS):
        rest = fold != held_out
        sums = np.bincount(key[rest], weights=labels[rest], minlength=key.max() + 1)
        sizes = np.bincount(key[rest], minlength=key.max() + 1)
        out[~rest] = ((sums + 5 * labels[rest].mean()) / (sizes + 5))[key[~rest]]
    return out


def _out_of_fold_kmers(
    labels: np.ndarray, groups: np.ndarray, variants: list[Variant], scorer: VariantScorer, k: int = 4, flank: int = 16
) -> np.ndarray:
    """Ridge on the change of k-mer counts that the variant makes, and on the counts around it, by folds of groups."""
    from genomoe.evaluation.finetuning import kmer_counts

    rule = CentredWindow(length=2 * flank)
    pairs = []
    for variant in variants:
        if max(len(variant.ref), len(variant.alt)) > rule.longest_allele:
            pairs.append((b"N", b"N"))
            continue
        window = rule.interval(variant, scorer.reference.contigs[variant.contig])
        found = haplotypes(variant, window, scorer.reference)
        pairs.append((found.ref, found.alt))
    ref, alt = (kmer_counts(list(side), k) for side in zip(*pairs, strict=True))
    design = np.concatenate([alt - ref, ref], axis=1)
    fold, out = _folds(groups), np.zeros(len(labels))
    for held_out in range(FOLDS):
        rest = fold != held_out
        if not rest.any() or rest.all():
            continue
        mean, centre = design[rest].mean(0), labels[rest].mean()
        x = design[rest] - mean
        # the smaller of both systems: rows or columns
        dual = np.linalg.solve(x @ x.T + 30.0 * np.eye(len(x)), labels[rest] - centre)
        out[~rest] = (design[~rest] - mean) @ (x.T @ dual) + centre
    return out


def _markov(variants: list[Variant], scorer: VariantScorer) -> np.ndarray:
    """REF's minus ALT's log-likelihood under a Markov model of the reference itself, both strands."""
    reference = scorer.reference
    used = sorted({variant.contig for variant in variants})
    share = MARKOV_BASES // len(used)
    training = [encode(reference.fetch(Interval(contig, 0, min(share, reference.contigs[contig])))) for contig in used]
    model = MarkovModel.fit(training, max_order=8)
    rule, out = CentredWindow(length=64), np.zeros(len(variants))
    rows, sequences = [], []
    for row, variant in enumerate(variants):
        if max(len(variant.ref), len(variant.alt)) <= rule.longest_allele:
            window = rule.interval(variant, reference.contigs[variant.contig])
            found = haplotypes(variant, window, reference)
            rows.append(row)
            sequences += [found.ref, found.alt, reverse_complement(found.ref), reverse_complement(found.alt)]
    bits = np.array([np.nansum(model.bits(encode(sequence))[-1]) for sequence in sequences])
    both = bits.reshape(-1, 2, 2)  # row, strand, haplotype
    out[rows] = (both[:, :, 1] - both[:, :, 0]).mean(1)
    return out


def _within(kept: pd.DataFrame, names: list[str], binary: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    metric = METRICS["auroc" if binary else "spearman"]
    labels = kept["label"].to_numpy(dtype=float)
    tables, means = [], []
    for grouping in ("class", "group"):
        if not 1 < kept[grouping].nunique() <= 1000:
            continue
        for name in names:
            table, mean = within_groups(metric, labels, kept[name].to_numpy(), kept[grouping].to_numpy())
            tables.append(table.assign(grouping=grouping, score=name))
            means.append((grouping, name, mean))
    columns = ["grouping", "group", "rows", "positives", "score", "value"]
    joined = pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)
    return joined, pd.DataFrame(means, columns=["grouping", "score", "value"])


def _warnings(overall: pd.DataFrame, means: pd.DataFrame, groupings: Mapping[str, float], metric: str) -> list[str]:
    found = []
    by_score = overall[overall["metric"] == metric].set_index("score")
    model = by_score.loc["model"]
    chance = 0.5 if metric == "auroc" else 0.0
    if model["low"] <= chance <= model["high"]:
        found.append(f"The model is at chance: its {metric} of {model['value']:.3f} has an interval around {chance}.")
    for grouping, value in groupings.items():
        if value >= model["value"] - EXPLAINED and value > CHANCE:
            found.append(
                f"The {grouping} of a variant alone, without its sequence, reaches an AUROC of {value:.3f} "
                f"(the model {model['value']:.3f}): the score may only tell {grouping} apart; read the figures within."
            )
    inside = means[means["score"] == "model"].set_index("grouping")["value"]
    for within, value in inside.items():
        if metric == "auroc" and np.isfinite(value) and model["value"] - value > EXPLAINED:
            found.append(f"Within {within} the model's AUROC falls from {model['value']:.3f} to {value:.3f}.")
    for name in by_score.index.drop("model"):
        if by_score.loc[name, "value"] >= model["value"]:
            found.append(f"The baseline '{name}' ({by_score.loc[name, 'value']:.3f}) is no worse than the model.")
    return found


def probability(rows: pd.DataFrame) -> np.ndarray:
    """The model's score as a probability: logistic regression on the score alone, out of fold, for calibration."""
    labels, scores = rows["label"].to_numpy(dtype=float), rows["model"].to_numpy(dtype=float)
    scaled = (scores - scores.mean()) / (scores.std() or 1.0)
    fold, out = _folds(np.arange(len(labels))), np.zeros(len(labels))
    for held_out in range(FOLDS):
        rest = fold != held_out
        weights = np.zeros(2)
        design = np.stack([np.ones(rest.sum()), scaled[rest]], axis=1)
        for _ in range(50):  # Newton's method with a little ridge
            p = 1 / (1 + np.exp(-design @ weights))
            gradient = design.T @ (p - labels[rest]) + 1e-3 * weights
            hessian = (design * (p * (1 - p))[:, None]).T @ design + 1e-3 * np.eye(2)
            step = np.linalg.solve(hessian, gradient)
            weights -= step
            if np.abs(step).max() < 1e-8:
                break
        out[~rest] = 1 / (1 + np.exp(-(weights[0] + weights[1] * scaled[~rest])))
    return out
