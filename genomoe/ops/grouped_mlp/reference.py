"""The expert layer as a loop over experts: the obvious twin of every faster backend.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def grouped_mlp_reference(
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E I2 D"],
    w_down_EDI: Float[Tensor, "E D I"],
    expert_index_TK: Int[Tensor, "T K"],
    scores_TK: Float[Tensor, "T K"],
) -> Float[Tensor, "T D"]:
    """y_t = sum_k score_tk * down_e(silu(gate_e x_t) * up_e x_t) with e = expert_index_tk, accumulated in float32.

    Every expert takes part in the graph, so one that gets no token has a gradient of exactly zero.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in range(w_up_E2ID.shape[0]):
        token_N, choice_N = torch.where(expert_index_TK == expert)
        gate_NI, up_NI = F.linear(x_TD[token_N], w_up_E2ID[expert]).chunk(2, dim=-1)
        out_ND = F.linear(F.silu(gate_NI) * up_NI, w_down_EDI[expert])
        y_TD = y_TD.index_add(0, token_N, out_ND.float() * scores_TK[token_N, choice_N, None].float())
    return y_TD.to(x_TD.dtype)
