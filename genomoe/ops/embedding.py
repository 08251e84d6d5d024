"""Token embedding whose gradient is one product.

Axis legend: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.matmul import wide_mm

SMALL_VOCABULARY = 1024
ONE_HOT_AT_ONCE = 1 << 27
"""Most one-hot values (T x V) made at a time."""


def embed(tokens_T: Int[Tensor, " T"], weight_VD: Float[Tensor, "V D"]) -> Float[Tensor, "T D"]:
    """Rows of `weight_VD`.

    With a vocabulary of nucleotides nearly all tokens share a few rows, which PyTorch's sort-and-segment gradient on
    CUDA handles slowly, with a synchronisation, and in any order; there the gradient is one-hot^T times the output's
    gradient, summed in float32 in a fixed order.
    """
    if tokens_T.is_cuda and weight_VD.shape[0] <= SMALL_VOCABULARY:
        return _Embed.apply(tokens_T, weight_VD)
    return F.embedding(tokens_T, weight_VD)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.like = weight_VD.shape[0], weight_VD.dtype
        return F.embedding(tokens_T, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (tokens_T,) = ctx.saved_tensors
        V, dtype = ctx.like
        total_VD = torch.zeros(V, grads[0].shape[1], dtype=torch.float32, device=tokens_T.device)
        row_V = torch.arange(V, device=tokens_T.device)
        step = max(1, ONE_HOT_AT_ONCE // V)
        for start in range(0, len(tokens_T), step):
            rows = slice(start, start + step)
            one_hot_TV = (tokens_T[rows, None] == row_V).to(grads[0].dtype)
            total_VD += wide_mm(one_hot_TV.t(), grads[0][rows])
        return None, total_VD.to(dtype)
