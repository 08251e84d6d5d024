"""Cross-entropy of a linear head, without ever holding all logits, and with its gradient made in the same pass.

Axis legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.matmul import wide_mm

LOGITS_AT_ONCE = 1 << 26
"""Most logits (T x V) made at a time unless told otherwise: 256 MiB in float32."""


class CrossEntropySums(NamedTuple):
    """Float32 scalars, nats."""

    weighted_nats: Tensor
    """Sum of weight x (nats + z_coef x logsumexp^2); differentiable."""
    nats: Tensor
    """Sum of nats over the tokens with a weight above 0."""


def linear_cross_entropy(
    hidden_TD: Float[Tensor, "T D"],
    weight_VD: Float[Tensor, "V D"],
    labels_T: Int[Tensor, " T"],
    weights_T: Float[Tensor, " T"],
    *,
    chunk: int | None = None,
    z_coef: float = 0.0,
) -> CrossEntropySums:
    """Sums of -log softmax(hidden weight^T)[label], chunk by chunk.

    Products take `hidden`'s dtype and give float32; softmax and sums are float32. If a gradient is wanted it is made
    at once, while a chunk's logits exist (as in Liger, arXiv:2410.10989), so the backward pass only scales it; it can
    run once.

    Args:
        labels_T: any valid id where the weight is 0.
        weights_T: weight of each token.
        chunk: tokens at a time; None: as many as `LOGITS_AT_ONCE` allows.
        z_coef: of an added z-loss, logsumexp(logits)^2 (PaLM, arXiv:2204.02311).
    """
    chunk = chunk or max(1, LOGITS_AT_ONCE // weight_VD.shape[0])
    return CrossEntropySums(
        *_LinearCrossEntropy.apply(hidden_TD, weight_VD, labels_T, weights_T.float(), chunk, z_coef)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        weights_T: Tensor,
        chunk: int,
        z_coef: float,
    ) -> tuple[Tensor, Tensor]:
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        cast_VD = weight_VD.to(hidden_TD.dtype)
        weighted = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        plain = torch.zeros_like(weighted)
        dhidden_TD = torch.empty_like(hidden_TD) if want_hidden else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if want_weight else None
        for start in range(0, hidden_TD.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden, weights, labels = hidden_TD[rows], weights_T[rows], labels_T[rows, None].long()
            logits_TV = wide_mm(hidden, cast_VD.t())
            lse_T = logits_TV.logsumexp(1)
            nats_T = lse_T - logits_TV.gather(1, labels)[:, 0]
            plain += torch.where(weights > 0, nats_T, 0.0).sum()
            weighted += (weights * (nats_T + z_coef * lse_T.square() if z_coef else nats_T)).sum()
            if not (want_hidden or want_weight):
                continue
            dlogits_TV = logits_TV.sub_(lse_T[:, None]).exp_()
            if z_coef:
                dlogits_TV *= (1 + 2 * z_coef * lse_T)[:, None]
            dlogits_TV.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=torch.float32))
            dlogits_TV = (dlogits_TV * weights[:, None]).to(hidden.dtype)
            if dhidden_TD is not None:
                torch.mm(dlogits_TV, cast_VD, out=dhidden_TD[rows])
            if dweight_VD is not None:
                dweight_VD += wide_mm(dlogits_TV.t(), hidden)
        ctx.kept = (dhidden_TD, None if dweight_VD is None else dweight_VD.to(weight_VD.dtype))
        ctx.mark_non_differentiable(plain)
        return weighted, plain

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            raise RuntimeError("linear_cross_entropy can go backward once: its gradient was scaled in place")
        dhidden_TD, dweight_VD = ctx.kept
        ctx.kept = None
        for grad in (dhidden_TD, dweight_VD):
            if grad is not None:
                grad.mul_(grads[0].to(grad.dtype))
        return dhidden_TD, dweight_VD, None, None, None, None
