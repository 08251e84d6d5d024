"""Bits per base as a running metric, reduced over all ranks."""

import torch
from torchmetrics import Metric

from genomoe.training.losses import NATS_PER_BIT, LossOutput


class BitsPerBase(Metric):
    """Weighted and plain mean of -log2 p(base), over everything since `reset`.

    Sums are kept in float64, so that a long validation loses nothing, and are added over the ranks.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = False

    weighted_nats: torch.Tensor
    weight: torch.Tensor
    nats: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("weighted_nats", "weight", "nats", "count"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, loss: LossOutput) -> None:
        """Add the sums of one batch."""
        self.weighted_nats += loss.weighted_nats_sum
        self.weight += loss.weight_sum
        self.nats += loss.nats_sum
        self.count += loss.tokens

    def compute(self) -> dict[str, torch.Tensor]:
        """`{"bits_per_base", "bits_per_base_weighted"}`; NaN before any base was counted."""
        return {
            "bits_per_base": self.nats / self.count / NATS_PER_BIT,
            "bits_per_base_weighted": self.weighted_nats / self.weight / NATS_PER_BIT,
        }
