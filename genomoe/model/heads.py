"""Small heads on the hidden states, for labels other than the next base.

Axis legend: B batch, S sequence, D hidden size, O outputs.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

Pooling = Literal["mean", "max", "last"]


def pool(hidden_BSD: Float[Tensor, "B S D"], valid_BS: Bool[Tensor, "B S"], how: Pooling) -> Float[Tensor, "B D"]:
    """One float32 vector per sequence from its non-padding tokens; a sequence without any gives zeros.

    Args:
        hidden_BSD: hidden states.
        valid_BS: False for padding, which never changes the result.
        how: mean, max, or the last valid token (which alone has seen the whole sequence).
    """
    hidden_BSD = torch.where(valid_BS[..., None], hidden_BSD.float(), 0.0)
    count_B = valid_BS.sum(1)
    if how == "mean":
        return hidden_BSD.sum(1) / count_B.clamp(min=1)[:, None]
    if how == "last":
        position_S = torch.arange(valid_BS.shape[1], device=valid_BS.device)
        last_B = torch.where(valid_BS, position_S, 0).amax(1)
        return hidden_BSD[torch.arange(len(last_B), device=last_B.device), last_B]
    if how == "max":
        lowest = hidden_BSD.masked_fill(~valid_BS[..., None], float("-inf")).amax(1)
        return torch.where(count_B[:, None] > 0, lowest, 0.0)
    raise ValueError(f"pooling must be mean, max or last, got {how!r}")


class SequenceHead(nn.Module):
    """One prediction per sequence: pooling, then a linear layer or a small MLP, in float32.

    Args:
        hidden_size: D.
        outputs: O, classes or regression targets.
        pooling: see `pool`.
        mlp_size: width of a hidden layer; None: linear.
        dropout: before the last layer.
    """

    def __init__(
        self,
        hidden_size: int,
        outputs: int,
        *,
        pooling: Pooling = "mean",
        mlp_size: int | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        size = mlp_size or hidden_size
        self.hidden = nn.Linear(hidden_size, size, device=device) if mlp_size else None
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(size, outputs, device=device)

    def forward(self, hidden_BSD: Float[Tensor, "B S D"], valid_BS: Bool[Tensor, "B S"]) -> Float[Tensor, "B O"]:
        """Predictions, float32."""
        with torch.autocast(hidden_BSD.device.type, enabled=False):
            x_BD = pool(hidden_BSD, valid_BS, self.pooling)
            if self.hidden is not None:
                x_BD = nn.functional.gelu(self.hidden(x_BD))
            return self.out(self.dropout(x_BD))
