"""Chunks and recomputation for expert functions that know neither.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def in_chunks(
    experts: Callable[..., Tensor],
    x_TD: Tensor,
    w_up_E2ID: Tensor,
    w_down_EDI: Tensor,
    expert_index_TK: Tensor,
    scores_TK: Tensor,
    *,
    residual_TD: Tensor | None,
    recompute: bool,
    chunk_tokens: int | None,
) -> Tensor:
    """``experts`` over ``chunk_tokens`` tokens at a time, and the residual added.

    With ``recompute`` only the inputs are kept for backward.
    """
    T = x_TD.shape[0]
    step = chunk_tokens or max(T, 1)
    out = []
    for start in range(0, max(T, 1), step):
        rows = slice(start, start + step)
        args = (x_TD[rows], w_up_E2ID, w_down_EDI, expert_index_TK[rows], scores_TK[rows])
        if recompute and torch.is_grad_enabled():
            out.append(checkpoint(experts, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            out.append(experts(*args))
    y_TD = out[0] if len(out) == 1 else torch.cat(out)
    return y_TD if residual_TD is None else residual_TD + y_TD
