"""The expert layer as two grouped products of PyTorch (`torch._grouped_mm`) with plain passes around them.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width, N = T*K sorted rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.permute import combine, sort_by_expert


def unsupported(x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str) -> str | None:
    """Why these tensors cannot be multiplied here in this way, or None."""
    if precision != "bf16" or save == "mxfp8":
        return "grouped_mm multiplies and keeps the weights' own dtype: precision=bf16, save=bf16 or save=recompute"
    D, I = x_TD.shape[1], w_up_E2ID.shape[1] // 2
    if x_TD.device.type == "cuda":
        if x_TD.dtype != torch.bfloat16:
            return f"torch._grouped_mm on CUDA multiplies bfloat16 only, not {x_TD.dtype}"
        if torch.cuda.get_device_capability(x_TD.device) < (8, 0):
            return "torch._grouped_mm needs compute capability 8.0"
    elif x_TD.device.type != "cpu":
        return f"torch._grouped_mm has no kernel for {x_TD.device.type}"
    step = 16 // x_TD.element_size()
    if D % step or I % step:
        return f"torch._grouped_mm needs row strides of 16 bytes: hidden size {D} and expert width {I} by {step}"
    return None


class _GroupedProduct(torch.autograd.Function):
    """y_NO = x_NI @ w_e^T for the rows of every expert e.

    The library's own backward rejects a gradient with stride 0 and leaves the weight gradient of an expert without
    rows unwritten; both are settled here.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, w_EOI: Tensor, offsets_E: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, w_EOI, offsets_E, counts_E)
        return torch._grouped_mm(x_NI, w_EOI.transpose(1, 2), offs=offsets_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, w_EOI, offsets_E, counts_E = ctx.saved_tensors
        dy_NO = grads[0].contiguous()
        dx_NI = dw_EOI = None
        if ctx.needs_input_grad[0]:
            dx_NI = torch._grouped_mm(dy_NO, w_EOI, offs=offsets_E)
        if ctx.needs_input_grad[1]:
            dw_EOI = torch._grouped_mm(dy_NO.t(), x_NI, offs=offsets_E)
            dw_EOI.masked_fill_((counts_E == 0)[:, None, None], 0)
        return dx_NI, dw_EOI, None, None


def grouped_mlp_grouped_mm(
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E I2 D"],
    w_down_EDI: Float[Tensor, "E D I"],
    expert_index_TK: Int[Tensor, "T K"],
    scores_TK: Float[Tensor, "T K"],
) -> Float[Tensor, "T D"]:
    """Same arithmetic as the reference; rows are gathered by expert, so no token is dropped and nothing is padded."""
    order = sort_by_expert(expert_index_TK, w_up_E2ID.shape[0])
    x_ND = x_TD[order.token_N]
    gate_NI, up_NI = _GroupedProduct.apply(x_ND, w_up_E2ID, order.offsets_E, order.counts_E).chunk(2, dim=-1)
    y_ND = _GroupedProduct.apply(F.silu(gate_NI) * up_NI, w_down_EDI, order.offsets_E, order.counts_E)
    return combine(y_ND, scores_TK, order)
