"""Heads for fine-tuning that keep positions apart, as libraries of aligned sequences need.

Axis legend: B batch, S positions, D features of a position, O outputs, C channels.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from genomoe.model.heads import Pooling, SequenceHead

__all__ = ["PositionHead", "make_head"]


class PositionHead(nn.Module):
    """Each position through one shared linear map to C channels, all of them through a small MLP.

    For sequences of one length whose positions mean the same, such as variants of one promoter; with C = D
    and no hidden layer it would be a linear model with a weight for every feature of every position.
    """

    def __init__(self, features: int, positions: int, outputs: int, *, channels: int, hidden: int, dropout: float):
        super().__init__()
        self.positions = positions
        self.mix = nn.Linear(features, channels)
        self.hidden = nn.Linear(positions * channels, hidden)
        self.out = nn.Linear(hidden, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_BSD: Float[Tensor, "B S D"], valid_BS: Bool[Tensor, "B S"]) -> Float[Tensor, "B O"]:
        x_BF = self.dropout(self.mix(hidden_BSD.float()).flatten(1))
        return self.out(self.dropout(F.gelu(self.hidden(x_BF))))


def make_head(
    pooling: str,
    *,
    features: int,
    positions: int | None,
    outputs: int,
    channels: int,
    hidden: int,
    dropout: float,
) -> nn.Module:
    """A head by its pooling: mean, max or last of the tokens, or position (needs one length for all
    sequences).
    """
    if pooling != "position":
        how: Pooling = pooling  # type: ignore[assignment]
        return SequenceHead(features, outputs, pooling=how, mlp_size=hidden or None, dropout=dropout)
    if positions is None:
        raise ValueError("head.pooling=position needs sequences of one length: choose mean, max or last")
    return PositionHead(features, positions, outputs, channels=channels, hidden=hidden, dropout=dropout)
