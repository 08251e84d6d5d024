"""The expert layer as a loop over experts: the obvious twin of every faster backend, in every precision.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width, N rows of one expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.mxfp8 import BLOCK, MXFP8, dequantize_mxfp8, quantize_mxfp8, round_mxfp8


def grouped_mlp_reference(
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E I2 D"],
    w_down_EDI: Float[Tensor, "E D I"],
    expert_index_TK: Int[Tensor, "T K"],
    scores_TK: Float[Tensor, "T K"],
    *,
    precision: str = "bf16",
    save: str = "bf16",
) -> Float[Tensor, "T D"]:
    """y_t = sum_k score_tk * down_e(silu(gate_e x_t) * up_e x_t) with e = expert_index_tk, accumulated in float32.

    Every expert takes part in the graph, so one that gets no token has a gradient of exactly zero. With precision "fp8"
    or "mxfp8" both operands of every product, forward and backward, are rounded to that format and multiplied exactly.
    """
    product = F.linear if precision == "bf16" else ROUNDED_PRODUCT[precision].apply
    activation = _SwiGLUKeptInMXFP8.apply if save == "mxfp8" else swiglu
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in range(w_up_E2ID.shape[0]):
        token_N, choice_N = torch.where(expert_index_TK == expert)
        a_NI = activation(product(x_TD[token_N], w_up_E2ID[expert]))
        out_ND = product(a_NI, w_down_EDI[expert])
        y_TD.index_add_(0, token_N, out_ND.float() * scores_TK[token_N, choice_N, None].float())
    return y_TD.to(x_TD.dtype)


def swiglu(h_N2I: Float[Tensor, "N I2"]) -> Float[Tensor, "N I"]:
    """silu(gate) * up, with the gate in the first half of the columns."""
    gate_NI, up_NI = h_N2I.chunk(2, dim=-1)
    return F.silu(gate_NI) * up_NI


class _SwiGLUKeptInMXFP8(torch.autograd.Function):
    """`swiglu` whose backward sees its input as MXFP8 kept it."""

    @staticmethod
    def forward(ctx, h_N2I: Tensor) -> Tensor:
        ctx.save_for_backward(*quantize_mxfp8(h_N2I))
        return swiglu(h_N2I)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        with torch.enable_grad():
            h_N2I = dequantize_mxfp8(MXFP8(*ctx.saved_tensors), grads[0].dtype).requires_grad_()
            return torch.autograd.grad(swiglu(h_N2I), h_N2I, grads[0])[0]


def round_mx_padded(x: Float[Tensor, "M N"], dim: int) -> Float[Tensor, "M N"]:
    """Rounded to MXFP8 along ``dim``, whose last block is filled up with zeros."""
    missing = -x.shape[dim] % BLOCK
    padded = F.pad(x, (0, missing) if dim in (1, -1) else (0, 0, 0, missing))
    return round_mxfp8(padded, dim).narrow(dim, 0, x.shape[dim])


def round_e4m3(x: Float[Tensor, "M N"], largest: Tensor) -> Float[Tensor, "M N"]:
    """Rounded to e4m3 times the smallest power of two for which ``largest`` does not saturate."""
    mantissa, exponent = torch.frexp(largest.float())
    scale = torch.exp2((exponent - 9 + (mantissa > 0.875).int()).float().clamp(min=-126))  # 448 = 0.875 * 2**9
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def round_rows_e4m3(x: Float[Tensor, "M N"], dim: int) -> Float[Tensor, "M N"]:
    """One scale per row, whichever dimension is contracted."""
    return x if x.numel() == 0 else round_e4m3(x, x.abs().amax(1, keepdim=True))


def round_matrix_e4m3(w: Float[Tensor, "M N"], dim: int) -> Float[Tensor, "M N"]:
    """One scale per matrix."""
    return round_e4m3(w, w.abs().amax())


def _rounded_product(
    round_rows: Callable[[Tensor, int], Tensor], round_weight: Callable[[Tensor, int], Tensor]
) -> type[torch.autograd.Function]:
    """`F.linear` with the operands of its three products rounded along the dimension that each contracts."""

    class RoundedProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x_NC: Tensor, w_OC: Tensor) -> Tensor:
            ctx.save_for_backward(x_NC, w_OC)
            return round_rows(x_NC, 1) @ round_weight(w_OC, 1).t()

        @staticmethod
        def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x_NC, w_OC = ctx.saved_tensors
            dx_NC = round_rows(grads[0], 1) @ round_weight(w_OC, 0)
            dw_OC = round_rows(grads[0], 0).t() @ round_rows(x_NC, 0)
            return dx_NC, dw_OC

    return RoundedProduct


ROUNDED_PRODUCT = {
    "fp8": _rounded_product(round_rows_e4m3, round_matrix_e4m3),
    "mxfp8": _rounded_product(round_mx_padded, round_mx_padded),
}
