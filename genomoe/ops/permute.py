"""Tokens sorted by expert, and back.

Axis legend: T tokens, K experts chosen per token, N = T*K rows (one per token and choice), E experts, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class ExpertOrder(NamedTuple):
    """The rows of all experts, expert after expert; within one expert in token order (the sort is stable)."""

    row_N: Tensor
    """For each sorted row, the flat index t*K + k it came from (int64)."""
    token_N: Tensor
    """For each sorted row, its token t (int64)."""
    position_N: Tensor
    """For each flat index t*K + k, its place among the sorted rows (int64): the inverse of `row_N`."""
    counts_E: Tensor
    """Rows of each expert (int64); may be 0."""
    offsets_E: Tensor
    """End of each expert's rows (int32), as grouped products want it."""


def sort_by_expert(expert_index_TK: Int[Tensor, "T K"], num_experts: int) -> ExpertOrder:
    """Order the T*K rows by expert without a device-to-host synchronisation."""
    T, K = expert_index_TK.shape
    flat_N = expert_index_TK.reshape(-1).long()
    row_N = torch.sort(flat_N, stable=True).indices
    position_N = torch.empty_like(row_N)
    position_N[row_N] = torch.arange(T * K, device=row_N.device)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=row_N.device)
    counts_E.scatter_add_(0, flat_N, torch.ones_like(flat_N))
    return ExpertOrder(row_N, row_N // K, position_N, counts_E, counts_E.cumsum(0).to(torch.int32))


def combine(y_ND: Float[Tensor, "N D"], scores_TK: Float[Tensor, "T K"], order: ExpertOrder) -> Float[Tensor, "T D"]:
    """Sum of each token's K expert outputs, weighted by its scores; the sum in float32."""
    T, K = scores_TK.shape
    y_TKD = y_ND[order.position_N].view(T, K, y_ND.shape[1])
    return (y_TKD.float() * scores_TK.float()[:, :, None]).sum(1).to(y_ND.dtype)
