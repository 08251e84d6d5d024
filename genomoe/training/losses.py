"""The next-base loss: weighted cross-entropy in float32, without ever holding all logits.

Axes: T tokens, D model, V vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NATS_PER_BIT = 0.6931471805599453


class LossOutput(NamedTuple):
    """Loss of a batch and the sums it was made of (all float32 scalars, nats)."""

    loss: Tensor
    """Weighted mean; 0 where every weight is 0."""
    weighted_nats_sum: Tensor
    """Sum of weight x nats over all tokens (detached)."""
    weight_sum: Tensor
    """Sum of the weights."""
    nats_sum: Tensor
    """Sum of nats over the tokens with a weight above 0 (detached)."""
    count: Tensor
    """Number of tokens with a weight above 0."""


def next_token_loss(
    hidden: Float[Tensor, "*tokens D"],
    lm_head_weight: Float[Tensor, "V D"],
    labels: Int[Tensor, "*tokens"],
    weights: Float[Tensor, "*tokens"],
    *,
    chunk: int | None = None,
) -> LossOutput:
    """Weighted mean cross-entropy of `hidden @ lm_head_weight.T` against `labels`.

    Logits are made in the dtype of `hidden` and normalised in float32. With `chunk`, that many tokens at a
    time are projected and the backward pass projects them again, so that the peak is chunk x V floats. A
    label whose weight is 0 may be any valid id.
    """
    hidden_TD, labels_T, weights_T = hidden.flatten(0, -2), labels.flatten(), weights.flatten().float()
    sums = torch.zeros(2, device=hidden.device, dtype=torch.float32)
    chunk = chunk or hidden_TD.shape[0]
    for start in range(0, hidden_TD.shape[0], chunk):
        part = slice(start, start + chunk)
        arguments = (hidden_TD[part], lm_head_weight, labels_T[part], weights_T[part])
        if chunk < hidden_TD.shape[0] and torch.is_grad_enabled():
            sums = sums + checkpoint(_sums, *arguments, use_reentrant=False)
        else:
            sums = sums + _sums(*arguments)
    weight_sum = weights_T.sum()
    loss = sums[0] / weight_sum.clamp_min(torch.finfo(torch.float32).tiny)
    return LossOutput(
        loss=loss,
        weighted_nats_sum=sums[0].detach(),
        weight_sum=weight_sum,
        nats_sum=sums[1].detach(),
        count=(weights_T > 0).sum().float(),
    )


def _sums(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, weights_T: Tensor) -> Tensor:
    logits_TV = (hidden_TD @ weight_VD.to(hidden_TD.dtype).T).float()
    nats_T = F.cross_entropy(logits_TV, labels_T, reduction="none")
    return torch.stack([(nats_T * weights_T).sum(), nats_T.detach()[weights_T > 0].sum()])
