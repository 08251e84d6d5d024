"""The next-base loss: weighted cross-entropy in float32, without ever holding all logits.

Axes: T tokens, D model, V vocabulary.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.loss import linear_cross_entropy

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
    tokens: Tensor
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

    See `genomoe.ops.loss.linear_cross_entropy`: products in the dtype of `hidden` with float32 results, softmax and
    sums in float32, `chunk` tokens at a time, the gradient made while a chunk's logits exist. A label whose weight
    is 0 may be any valid id.
    """
    weights_T = weights.flatten().float()
    sums = linear_cross_entropy(hidden.flatten(0, -2), lm_head_weight, labels.flatten(), weights_T, chunk=chunk)
    weight_sum = weights_T.sum()
    return LossOutput(
        loss=sums.weighted_nats / weight_sum.clamp_min(torch.finfo(torch.float32).tiny),
        weighted_nats_sum=sums.weighted_nats.detach(),
        weight_sum=weight_sum,
        nats_sum=sums.nats,
        tokens=(weights_T > 0).sum().float(),
    )
