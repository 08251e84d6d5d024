"""Softmax or sigmoid, top-k, renormalisation and the router losses' sums in one pass, and their gradient in another.

Axis legend: T tokens, E experts, K experts chosen per token, R rows a program holds, P programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64


@triton.jit
def route_forward_kernel(
    logits_ptr, bias_ptr, valid_ptr, index_ptr, scores_ptr, partial_ptr, T,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_VALID: tl.constexpr,
    CHOSEN: tl.constexpr, R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    expert = tl.arange(0, BLOCK_E)
    choice = tl.arange(0, BLOCK_K)
    inside = (row < T)[:, None] & (expert < E)[None, :]
    logits = tl.load(logits_ptr + row[:, None] * E + expert[None, :], mask=inside, other=float("-inf"))
    logits = tl.where((row < T)[:, None], logits, 0.0)
    logits = tl.where((expert < E)[None, :], logits, float("-inf"))
    top = tl.max(logits, axis=1)
    exps = tl.exp(logits - top[:, None])
    total = tl.sum(exps, axis=1)
    if SIGMOID:
        score = tl.where((expert < E)[None, :], 1.0 / (1.0 + tl.exp(-logits)), 0.0)
        prob = score / tl.sum(score, axis=1)[:, None]
    else:
        score = exps / total[:, None]
        prob = score
    if HAS_VALID:
        counted = tl.load(valid_ptr + row, mask=row < T, other=0).to(tl.int32) != 0
    else:
        counted = row < T

    ranking = tl.where((expert < E)[None, :], score, float("-inf"))
    if HAS_BIAS:
        ranking += tl.load(bias_ptr + expert, mask=expert < E, other=0.0)[None, :]
    chosen = tl.zeros([R, BLOCK_K], dtype=tl.float32)
    picked = tl.zeros([R, BLOCK_E], dtype=tl.float32)
    for k in tl.static_range(K):
        if CHOSEN:
            best = tl.load(index_ptr + row * K + k, mask=row < T, other=0).to(tl.int32)
        else:
            # nan logits must not send a token to an expert that does not exist
            best = tl.minimum(tl.argmax(ranking, axis=1), E - 1)
            tl.store(index_ptr + row * K + k, best.to(tl.int64), mask=row < T)
        hit = expert[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), axis=1)
        chosen = tl.where(choice[None, :] == k, value[:, None], chosen)
        picked += tl.where(hit, 1.0, 0.0)
        ranking = tl.where(hit, float("-inf"), ranking)
    scores = chosen / tl.sum(chosen, axis=1)[:, None]
    tl.store(scores_ptr + row[:, None] * K + choice[None, :], scores, mask=(row < T)[:, None] & (choice < K)[None, :])

    # sums over the counted rows of this program: loads, probabilities, (z, tokens)
    z = top + tl.log(total)
    out = partial_ptr + tl.program_id(0).to(tl.int64) * 3 * BLOCK_E
    tl.store(out + expert, tl.sum(tl.where(counted[:, None], picked, 0.0), axis=0))
    tl.store(out + BLOCK_E + expert, tl.sum(tl.where(counted[:, None], prob, 0.0), axis=0))
    z_sum = tl.sum(tl.where(counted, z * z, 0.0), axis=0)
    tokens = tl.sum(tl.where(counted, 1.0, 0.0), axis=0)
    tl.store(out + 2 * BLOCK_E + expert, tl.where(expert == 0, z_sum, tl.where(expert == 1, tokens, 0.0)))


@triton.jit
def route_backward_kernel(
    logits_ptr, valid_ptr, index_ptr, dscores_ptr, dprob_sum_ptr, dz_ptr, dlogits_ptr, T,
    E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, HAS_VALID: tl.constexpr,
    R: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    expert = tl.arange(0, BLOCK_E)
    inside = (row < T)[:, None] & (expert < E)[None, :]
    logits = tl.load(logits_ptr + row[:, None] * E + expert[None, :], mask=inside, other=float("-inf"))
    logits = tl.where((row < T)[:, None], logits, 0.0)
    logits = tl.where((expert < E)[None, :], logits, float("-inf"))
    top = tl.max(logits, axis=1)
    exps = tl.exp(logits - top[:, None])
    total = tl.sum(exps, axis=1)
    softmax = exps / total[:, None]
    lse = top + tl.log(total)
    if SIGMOID:
        score = tl.where((expert < E)[None, :], 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    else:
        score = softmax
    if HAS_VALID:
        counted = tl.load(valid_ptr + row, mask=row < T, other=0).to(tl.int32) != 0
    else:
        counted = row < T

    # scores_k = c_k / S with c_k the chosen scores and S their sum
    S = tl.zeros([R], dtype=tl.float32)
    inner = tl.zeros([R], dtype=tl.float32)
    dscore = tl.zeros([R, BLOCK_E], dtype=tl.float32)
    picked = tl.zeros([R, BLOCK_E], dtype=tl.float32)
    for k in tl.static_range(K):
        best = tl.load(index_ptr + row * K + k, mask=row < T, other=0).to(tl.int32)
        grad = tl.load(dscores_ptr + row * K + k, mask=row < T, other=0.0)
        hit = expert[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), axis=1)
        S += value
        inner += grad * value
        dscore += tl.where(hit, grad[:, None], 0.0)
        picked += tl.where(hit, 1.0, 0.0)
    dscore = (dscore - picked * (inner / S)[:, None]) / S[:, None]

    dprob = tl.load(dprob_sum_ptr + expert, mask=expert < E, other=0.0)
    dprob = tl.where(counted[:, None], dprob[None, :], 0.0)
    if SIGMOID:
        score_sum = tl.sum(score, axis=1)
        prob = score / score_sum[:, None]
        dscore += (dprob - tl.sum(dprob * prob, axis=1)[:, None]) / score_sum[:, None]
        dlogits = dscore * score * (1.0 - score)
    else:
        dscore += dprob
        dlogits = score * (dscore - tl.sum(dscore * score, axis=1)[:, None])
    dz = tl.load(dz_ptr)
    dlogits += tl.where(counted, 2.0 * dz * lse, 0.0)[:, None] * softmax
    tl.store(dlogits_ptr + row[:, None] * E + expert[None, :], dlogits, mask=inside)


class Route(torch.autograd.Function):
    """(logits, K, sigmoid, bias, valid, given index) -> (index, scores, counts, prob_sum, z_sum, tokens)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        top_k: int,
        sigmoid: bool,
        bias_E: Tensor | None,
        valid_T: Tensor | None,
        expert_index_TK: Tensor | None,
    ) -> tuple[Tensor, ...]:
        T, E = logits_TE.shape
        logits_TE = logits_TE.contiguous()
        block_e, block_k = max(2, triton.next_power_of_2(E)), triton.next_power_of_2(top_k)
        rows = max(1, min(ROWS, 2048 // block_e))
        programs = max(1, triton.cdiv(T, rows))
        device = logits_TE.device
        chosen = expert_index_TK is not None
        if expert_index_TK is not None:
            index_TK = expert_index_TK.long().contiguous()
        else:
            index_TK = torch.empty(T, top_k, dtype=torch.int64, device=device)
        scores_TK = torch.empty(T, top_k, dtype=torch.float32, device=device)
        partial_P3E = torch.empty(programs, 3, block_e, dtype=torch.float32, device=device)
        route_forward_kernel[(programs,)](
            logits_TE, logits_TE if bias_E is None else bias_E, logits_TE if valid_T is None else valid_T,
            index_TK, scores_TK, partial_P3E, T,
            E=E, K=top_k, SIGMOID=sigmoid, HAS_BIAS=bias_E is not None, HAS_VALID=valid_T is not None,
            CHOSEN=chosen, R=rows, BLOCK_E=block_e, BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
        sums_3E = partial_P3E.sum(0)
        counts_E, prob_sum_E = sums_3E[0, :E].clone(), sums_3E[1, :E].clone()
        z_sum, tokens = sums_3E[2, 0].clone(), sums_3E[2, 1].clone()
        ctx.save_for_backward(logits_TE, index_TK, valid_T)
        ctx.args = (top_k, sigmoid, rows, block_e, block_k)
        ctx.mark_non_differentiable(index_TK, counts_E, tokens)
        return index_TK, scores_TK, counts_E, prob_sum_E, z_sum, tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dscores_TK, dprob_sum_E, dz = grads[1].contiguous(), grads[3].contiguous(), grads[4].contiguous()
        logits_TE, index_TK, valid_T = ctx.saved_tensors
        top_k, sigmoid, rows, block_e, block_k = ctx.args
        T, E = logits_TE.shape
        dlogits_TE = torch.empty_like(logits_TE)
        route_backward_kernel[(max(1, triton.cdiv(T, rows)),)](
            logits_TE, logits_TE if valid_T is None else valid_T, index_TK, dscores_TK, dprob_sum_E, dz, dlogits_TE, T,
            E=E, K=top_k, SIGMOID=sigmoid, HAS_VALID=valid_T is not None,
            R=rows, BLOCK_E=block_e, BLOCK_K=block_k, num_warps=4,
        )  # fmt: skip
        return dlogits_TE, None, None, None, None, None
