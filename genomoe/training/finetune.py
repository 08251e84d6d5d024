"""Fine-tuning on a labelled task: several seeds, early stopping on validation, and a control from random
weights.

Modes: "full" trains everything, "lora" low-rank adapters of attention and experts, "head" only a head that
runs on top of the frozen backbone, "probe" the same with the backbone's features computed once and kept.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from genomoe.genome.alphabet import Tokenizer
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.adapters import merge_adapters, prepare_backbone
from genomoe.training.features import FeatureModel, TokenTable, cache_features, one_hot_features
from genomoe.training.finetune_module import (
    Batches,
    FineTuneModule,
    FineTuneOptions,
    Metric,
    Scaled,
    predictions_of,
    score_of,
)
from genomoe.training.heads import make_head
from genomoe.training.options import ConfigError
from genomoe.training.run import quiet_lightning
from genomoe.training.tasks import TaskConfig, TaskData

__all__ = [
    "FineTuneOptions",
    "FineTuneResult",
    "SeedResult",
    "finetune",
    "mean_and_spread",
    "score_of",
    "split_metrics",
    "train_on_one_hot",
]

Report = Callable[[str], None]
SCALE_ROWS = 2048
"""Training rows from which the scale of the features is taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedResult:
    """One seed: predictions of every row (a value, or a probability for each class) and how it came about."""

    seed: int
    predictions: np.ndarray
    validation: float
    epochs: int
    best_epoch: int
    history: list[dict[str, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuneResult:
    """All seeds of one way to start."""

    seeds: list[SeedResult]
    model: GenoMoEModel | None
    """Backbone of the best seed by validation, adapters merged; None without one."""
    head: nn.Module
    """Its scale and head."""
    trained_parameters: int
    label_scale: tuple[float, float] = (0.0, 1.0)
    """Mean and deviation that turn the head's output back into labels of a regression."""
    positions: int | None = None
    """Own positions of every row, if all agree."""


def finetune(
    data: TaskData,
    task: TaskConfig,
    options: FineTuneOptions,
    make_model: Callable[[], GenoMoEModel],
    tokenizer: Tokenizer,
    *,
    metric: Metric,
    accelerator: str = "cpu",
    report: Report | None = None,
) -> FineTuneResult:
    """Trains `options.seeds` heads (and, by mode, backbones) and predicts every row with each.

    Args:
        make_model: a fresh copy of the pretrained model, already on its device.
        metric: `(labels, scores) -> float`, higher is better; labels are standardised for a regression.
        accelerator: Lightning's name of the device.
        report: told in words what is going on.

    Raises ConfigError for settings that do not go together.
    """
    tell = report or (lambda text: None)
    table = TokenTable(data, tokenizer, both_strands=options.strands != "fwd")
    if options.pooling == "position":
        options.require(table.positions is not None, "pooling", "mean, max or last, as the sequences differ in length")
    results, best, kept = [], -math.inf, None
    cached = None
    trained = 0
    for seed in options.seeds:
        backbone = make_model()
        if table.longest > backbone.config.max_context:
            raise ConfigError(
                f"the longest sequence has {table.longest} tokens, but the model reads at most "
                f"{backbone.config.max_context}: cut the sequences, or take a model of a longer context."
            )
        layers = backbone.config.num_layers
        options.require(options.layer <= layers, "layer", f"at most {layers}, the model's layers")
        with _seeded(seed):
            adapted: Any = prepare_backbone(
                backbone,
                options.mode,
                rank=options.lora_rank,
                alpha=options.lora_alpha,
                dropout=options.lora_dropout,
            )
            model = FeatureModel(
                adapted,
                layer=options.layer,
                strands=options.strands,
                pair=task.input == "pair",
                pad_id=tokenizer.pad_id,
            )
            if options.mode == "probe":
                if cached is None:
                    tell(f"features of {len(table.ids)} rows")
                    cached = cache_features(model, table, batch=options.batch_size)
                    scale = _scale(*(x[data.where("train")[: 8 * SCALE_ROWS]] for x in cached))
                inputs, source = cached, None
            else:
                inputs, source = (torch.from_numpy(table.ids), torch.from_numpy(table.own)), model
                some = _some_rows(table, data.where("train")[:SCALE_ROWS])
                scale = _scale(*cache_features(model, some, batch=options.batch_size))
            head = _new_head(options, model.features, table.positions, data, scale)
            copies = 2 if options.strands == "average" else 1
            module, result = _train(head, source, inputs, data, options, copies, metric, accelerator, seed)
        tell(f"seed {seed}: validation {task.metric} {result.validation:.4f} at epoch {result.best_epoch}")
        results.append(result)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if result.validation > best:
            best, kept = result.validation, (merge_adapters(adapted), copy.deepcopy(module.head).cpu())
    assert kept is not None
    return FineTuneResult(
        seeds=results,
        model=kept[0],
        head=kept[1],
        trained_parameters=trained,
        label_scale=_label_scale(data),
        positions=table.positions,
    )


def train_on_one_hot(
    data: TaskData,
    options: FineTuneOptions,
    tokenizer: Tokenizer,
    *,
    metric: Metric,
    accelerator: str = "cpu",
) -> FineTuneResult:
    """The same head, seeds and stopping on one-hot bases: what is learnt without any language model."""
    table = TokenTable(data, tokenizer, both_strands=False)
    features, mask = one_hot_features(table, tokenizer)
    scale = torch.zeros(4), torch.ones(4)
    results, best, kept, trained = [], -math.inf, None, 0
    for seed in options.seeds:
        with _seeded(seed):
            head = _new_head(options, 4, table.positions, data, scale)
            module, result = _train(head, None, (features, mask), data, options, 1, metric, accelerator, seed)
        results.append(result)
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if result.validation > best:
            best, kept = result.validation, copy.deepcopy(module.head).cpu()
    assert kept is not None
    return FineTuneResult(seeds=results, model=None, head=kept, trained_parameters=trained)


def _train(
    head: Scaled,
    source: FeatureModel | None,
    inputs: tuple[Tensor, Tensor],
    data: TaskData,
    options: FineTuneOptions,
    copies: int,
    metric: Metric,
    accelerator: str,
    seed: int,
) -> tuple[FineTuneModule, SeedResult]:
    train, validation = data.where("train"), data.where("validation")
    classes = len(data.classes)
    mean, deviation = _label_scale(data)
    targets = torch.from_numpy(data.labels if classes else ((data.labels - mean) / deviation).astype(np.float32))
    weight = None
    if classes and options.class_weights == "balanced":
        counts = np.bincount(data.labels[train], minlength=classes)
        weight = torch.from_numpy(counts.sum() / (classes * np.maximum(counts, 1))).float()
    module = FineTuneModule(head, source, options, copies=copies, metric=metric, classes=classes, class_weight=weight)
    tensors = (*inputs, targets)
    with quiet_lightning():
        trainer = lightning.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=options.max_epochs,
            callbacks=[EarlyStopping("validation", mode="max", patience=options.patience)],
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            module,
            DataLoader(Batches(tensors, train, options.batch_size, seed=seed), batch_size=None),
            DataLoader(Batches(tensors, validation, 4 * options.batch_size, seed=None), batch_size=None),
        )
    module.restore_best()
    predictions = predictions_of(_predict(module, tensors, 4 * options.batch_size), classes)
    if not classes:
        predictions = predictions * deviation + mean
    value, epoch, _ = module.best
    result = SeedResult(
        seed=seed,
        predictions=predictions,
        validation=value,
        epochs=len(module.history),
        best_epoch=epoch,
        history=module.history,
    )
    return module, result


def _label_scale(data: TaskData) -> tuple[float, float]:
    """Mean and deviation of the training labels; of classes there are none."""
    if data.classes:
        return 0.0, 1.0
    labels = data.labels[data.where("train")]
    return float(labels.mean()), float(labels.std()) or 1.0


def _predict(module: FineTuneModule, tensors: tuple[Tensor, ...], size: int) -> Tensor:
    module.eval()
    device = module.head.mean.device
    rows = np.arange(len(tensors[0]))
    with torch.inference_mode():
        parts = [
            module(first.to(device), second.to(device)).cpu()
            for first, second, _ in Batches(tensors, rows, size, seed=None)
        ]
    return torch.cat(parts)


def _new_head(
    options: FineTuneOptions,
    features: int,
    positions: int | None,
    data: TaskData,
    scale: tuple[Tensor, Tensor],
) -> Scaled:
    head = make_head(
        options.pooling,
        features=features,
        positions=positions,
        outputs=max(1, len(data.classes)),
        channels=options.channels,
        hidden=options.hidden,
        dropout=options.dropout,
    )
    return Scaled(head, *scale)


def _scale(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each feature over the marked positions."""
    values = features[mask].float()
    return values.mean(0), values.std(0).clamp(min=1e-6)


def _some_rows(table: TokenTable, rows: np.ndarray) -> TokenTable:
    part = copy.copy(table)
    part.ids, part.own = table.ids[rows], table.own[rows]
    return part


class _seeded:
    """Torch's global generator seeded within the block and put back after it."""

    def __init__(self, seed: int):
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.random.get_rng_state()
        torch.manual_seed(self.seed)

    def __exit__(self, *rest: object) -> None:
        torch.random.set_rng_state(self.state)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one value)."""
    found = np.asarray(values, dtype=float)
    return float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else 0.0


def split_metrics(
    result: FineTuneResult, data: TaskData, metrics: Mapping[str, Metric], *, split: str = "test"
) -> dict[str, list[float]]:
    """Every metric of every seed on one split.

    Metrics of two classes are taken, for a regression, with labels split at their training median.
    """
    rows = data.where(split)
    labels = data.labels[rows].astype(float)
    median = float(np.median(data.labels[data.where("train")]))
    found: dict[str, list[float]] = {}
    for name, metric in metrics.items():
        binary = name in ("auroc", "auprc", "mcc") and not data.classes
        truth = (labels > median).astype(float) if binary else labels
        found[name] = [metric(truth, score_of(seed.predictions)[rows]) for seed in result.seeds]
    return found
