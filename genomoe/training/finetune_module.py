"""The module that fine-tuning trains: a head on features that are kept or made by a model, and its options.

Axis legend: B batch, S positions, F features of a position, O outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from genomoe.training.adapters import MODES
from genomoe.training.features import FeatureModel
from genomoe.training.optim import decay_groups
from genomoe.training.options import Options

__all__ = ["Batches", "FineTuneModule", "FineTuneOptions", "Metric", "Scaled", "predictions_of", "score_of"]

Metric = Callable[[np.ndarray, np.ndarray], float]
"""`(labels, scores)`: higher is better."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuneOptions(Options):
    """How to learn (the top of finetune.yaml)."""

    mode: str = "probe"
    """full, lora, head or probe."""
    layer: int = -1
    """Whose hidden states the head sees: -1 the last after its norm, 0 the embedding, n after layer n."""
    strands: str = "concat"
    """fwd; concat: both strands side by side; average: the mean of the predictions on both."""
    pooling: str = "position"
    """mean, max or last of the tokens, or position: each position apart, for sequences of one length."""
    channels: int = 16
    """Channels a position is reduced to (pooling=position)."""
    hidden: int = 64
    """Width of the head's hidden layer; 0: none (not for pooling=position)."""
    dropout: float = 0.3
    """Before both layers of the head."""
    learning_rate: float = 1e-3
    """Of the head."""
    backbone_learning_rate: float = 2e-4
    """Of the backbone or its adapters (full, lora)."""
    weight_decay: float = 0.05
    max_epochs: int = 30
    patience: int = 5
    """Epochs without a better validation metric before stopping."""
    batch_size: int = 256
    class_weights: str = "none"
    """balanced: the loss of a class weighs inversely to its rows."""
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    seeds: Sequence[int] = (1, 2, 3)
    """One head (and one training of the backbone) for each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        self.require_choice("mode", MODES)
        self.require_choice("strands", ("fwd", "concat", "average"))
        self.require_choice("pooling", ("mean", "max", "last", "position"))
        self.require_choice("class_weights", ("none", "balanced"))
        self.require_count("layer", minimum=-1)
        self.require_count("hidden", minimum=1 if self.pooling == "position" else 0)
        for key in ("channels", "max_epochs", "patience", "batch_size", "lora_rank"):
            self.require_count(key)
        self.require_number("dropout", maximum=0.95)
        for key in ("learning_rate", "backbone_learning_rate", "weight_decay", "lora_alpha", "lora_dropout"):
            self.require_number(key)
        self.require(len(self.seeds) > 0, "seeds", "a list of at least one whole number")


class Batches(IterableDataset):
    """Ready batches of rows; shuffled anew each epoch by (seed, epoch)."""

    def __init__(self, tensors: tuple[Tensor, ...], rows: np.ndarray, size: int, *, seed: int | None):
        self.tensors, self.rows, self.size, self.seed, self.epoch = tensors, rows, size, seed, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        rows = torch.from_numpy(self.rows)
        if self.seed is not None:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(len(rows))
            rows, self.epoch = rows[torch.from_numpy(order)], self.epoch + 1
        for part in rows.split(self.size):
            yield tuple(tensor[part] for tensor in self.tensors)

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.size)


class Scaled(nn.Module):
    """Features to mean 0 and deviation 1 (over training rows and positions), then a head."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, head: nn.Module, mean: Tensor, deviation: Tensor):
        super().__init__()
        self.head = head
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return self.head((features.float() - self.mean) / self.deviation, mask)


class FineTuneModule(lightning.LightningModule):
    """A head, and the features it stands on: kept ones, or a model that makes them."""

    class_weight: Tensor | None

    def __init__(
        self,
        head: Scaled,
        model: FeatureModel | None,
        options: FineTuneOptions,
        *,
        copies: int,
        metric: Metric,
        classes: int,
        class_weight: Tensor | None,
    ):
        super().__init__()
        self.head, self.model = head, model
        self.options, self.copies, self.metric, self.classes = options, copies, metric, classes
        self.register_buffer("class_weight", class_weight)
        self.history: list[dict[str, float]] = []
        self.best: tuple[float, int, dict[str, Tensor]] = (-math.inf, -1, {})
        self._losses: list[float] = []
        self._seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Outputs [B, O], the strands' averaged; inputs are token ids and marks, or features and mask."""
        if self.model is not None:
            features, mask = self.model(first.long(), second)
        else:  # [B, copies, S, F], copies to the front as the model gives them
            features, mask = first.transpose(0, 1).flatten(0, 1), second.transpose(0, 1).flatten(0, 1)
        return self.head(features, mask).unflatten(0, (self.copies, -1)).mean(0)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], index: int) -> Tensor:
        if self.model is not None and self.options.mode == "head":
            self.model.eval()
        first, second, target = batch
        out = self(first, second)
        if self.classes:
            loss = F.cross_entropy(out, target, weight=self.class_weight)
        else:
            loss = F.mse_loss(out[:, 0], target)
        self._losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], index: int) -> None:
        first, second, target = batch
        self._seen.append((self(first, second).cpu(), target.cpu()))

    def on_validation_epoch_end(self) -> None:
        out, target = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
        self._seen = []
        value = self.metric(target.double().numpy(), score_of(predictions_of(out, self.classes)))
        if not math.isfinite(value):
            value = -1.0
        self.log("validation", value, prog_bar=True)
        losses, self._losses = self._losses, []
        loss = float(np.mean(losses)) if losses else math.nan
        self.history.append({"epoch": self.current_epoch, "train_loss": loss, "validation": value})
        if value > self.best[0]:
            kept = {name: p.detach().clone() for name, p in self.named_parameters() if p.requires_grad}
            self.best = (value, self.current_epoch, kept)

    def restore_best(self) -> None:
        """Puts the weights of the best epoch back."""
        own = dict(self.named_parameters())
        with torch.no_grad():
            for name, value in self.best[2].items():
                own[name].copy_(value)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = []
        parts: list[tuple[nn.Module | None, float]] = [
            (self.head, self.options.learning_rate),
            (self.model, self.options.backbone_learning_rate),
        ]
        for part, rate in parts:
            if part is not None:
                for group in decay_groups(part.named_parameters(), self.options.weight_decay):
                    groups.append({**group, "lr": rate})
        return torch.optim.AdamW(groups)


def predictions_of(out: Tensor, classes: int) -> np.ndarray:
    """Values [N], or probabilities [N, classes]."""
    return (out.float().softmax(-1) if classes else out[:, 0]).double().numpy()


def score_of(predictions: np.ndarray) -> np.ndarray:
    """One number a row to rank by: the value, or the probability of the last class."""
    return predictions if predictions.ndim == 1 else predictions[:, -1]
