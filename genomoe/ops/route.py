"""Router arithmetic: logits in float32, the choice of experts, and the sums the router losses are made of.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from genomoe.ops.matmul import wide_mm
from genomoe.ops.pointwise import use_triton


class RoutingStats(NamedTuple):
    """Sums over the non-padding tokens of one layer, all float32."""

    counts_E: Tensor
    """Tokens sent to each expert; sums to K * tokens."""
    prob_sum_E: Tensor
    """Sum of each expert's probability; differentiable."""
    z_sum: Tensor
    """Sum of logsumexp(logits)^2; differentiable, scalar."""
    tokens: Tensor
    """Number of tokens, scalar."""


def router_logits(x_TD: Float[Tensor, "T D"], weight_ED: Float[Tensor, "E D"]) -> Float[Tensor, "T E"]:
    """x w^T with float32 products and sums, whatever the dtype of `x` and whatever autocast says."""
    with torch.autocast(x_TD.device.type, enabled=False):
        if x_TD.is_cuda and x_TD.dtype == torch.bfloat16:
            return _SplitProduct.apply(x_TD, weight_ED.float())
        return x_TD.float() @ weight_ED.float().t()


def split_bfloat16(x: Float[Tensor, "M N"]) -> tuple[Tensor, Tensor, Tensor]:
    """Three bfloat16 tensors whose sum is the float32 `x` to its last bit (3 x 8 bits of significand)."""
    high = x.bfloat16()
    rest = x - high.float()
    middle = rest.bfloat16()
    return high, middle, (rest - middle.float()).bfloat16()


class _SplitProduct(torch.autograd.Function):
    """float32 router logits of bfloat16 tokens on bfloat16 tensor cores.

    `x` is exact in bfloat16 and the weight is the sum of three bfloat16 tensors, so products are exact and sums are
    float32, as in a float32 product, while the tokens are read once in 2 bytes instead of three times in 4.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        E = weight_ED.shape[0]
        parts = torch.cat(split_bfloat16(weight_ED))
        return wide_mm(x_TD, parts.t()).view(-1, 3, E).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        E = weight_ED.shape[0]
        high_TE, middle_TE, low_TE = split_bfloat16(grads[0])
        dx_TD = dweight_ED = None
        if ctx.needs_input_grad[0]:
            # the result is rounded to bfloat16: two parts each are plenty
            w_high, w_middle, _ = split_bfloat16(weight_ED)
            dx_TD = torch.cat([high_TE, middle_TE, high_TE], 1) @ torch.cat([w_high, w_high, w_middle])
        if ctx.needs_input_grad[1]:
            parts_TE = torch.cat([high_TE, middle_TE, low_TE], 1)
            dweight_ED = wide_mm(parts_TE.t(), x_TD).view(3, E, -1).sum(0)
        return dx_TD, dweight_ED


def route(
    logits_TE: Float[Tensor, "T E"],
    top_k: int,
    *,
    kind: Literal["softmax", "sigmoid"] = "softmax",
    bias_E: Float[Tensor, " E"] | None = None,
    valid_T: Bool[Tensor, " T"] | None = None,
    expert_index_TK: Int[Tensor, "T K"] | None = None,
    backend: str = "auto",
) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"], RoutingStats]:
    """Choose K experts per token.

    Args:
        logits_TE: float32.
        top_k: K.
        kind: scores are a softmax over E, or sigmoids; those chosen are divided by their sum.
        bias_E: added to the scores for the choice only (loss-free balancing).
        valid_T: False for padding, which is routed but left out of the statistics.
        expert_index_TK: the choice, if it was made before.

    Returns:
        Experts (int64, best first), their scores (float32, sum 1) and the statistics.
    """
    if use_triton(logits_TE, backend) and logits_TE.shape[1] <= 256:
        from genomoe.ops.route_triton import Route

        index_TK, scores_TK, *sums = Route.apply(logits_TE, top_k, kind == "sigmoid", bias_E, valid_T, expert_index_TK)
        return index_TK, scores_TK, RoutingStats(*sums)
    score_TE = logits_TE.softmax(-1) if kind == "softmax" else logits_TE.sigmoid()
    if expert_index_TK is None:
        with torch.no_grad():
            choice_TE = score_TE if bias_E is None else score_TE + bias_E
            expert_index_TK = choice_TE.topk(top_k, dim=-1).indices
    chosen_TK = score_TE.gather(1, expert_index_TK)
    scores_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)

    prob_TE = score_TE if kind == "softmax" else score_TE / score_TE.sum(-1, keepdim=True)
    z_T = logits_TE.logsumexp(-1).square()
    with torch.no_grad():
        T, E = logits_TE.shape
        weight_T = torch.ones(T, device=logits_TE.device) if valid_T is None else valid_T.to(torch.float32)
        counts_E = torch.zeros(E, device=logits_TE.device)
        counts_E.scatter_add_(0, expert_index_TK.reshape(-1), weight_T.repeat_interleave(top_k))
    if valid_T is not None:
        # where, not a product: a padded row may hold anything, and 0 * inf is nan
        prob_TE = torch.where(valid_T[:, None], prob_TE, 0.0)
        z_T = torch.where(valid_T, z_T, 0.0)
    return expert_index_TK, scores_TK, RoutingStats(counts_E, prob_TE.sum(0), z_T.sum(), weight_T.sum())
