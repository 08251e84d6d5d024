"""The fused grouped MLP: Triton passes around the fastest products, little kept for backward.

Reference: `reference.py`, same signature, same result. What differs is how:

* tokens are grouped on the device into padded segments (`layout.py`); nothing waits for the host, no token is dropped;
* SwiGLU, the router's score and all quantisation happen in the passes between the products, in one reading, or (QuACK's
  products) in a product's epilogue;
* backward needs only gate and up (bf16 or MXFP8) or nothing at all (recompute), beside the layer's inputs; the score's
  gradient comes from <da, a>, so that expert outputs are never kept;
* every sum has a fixed order: results are bitwise equal from run to run;
* with ``chunk_tokens`` the buffers that grow with T K exist for one chunk of tokens at a time;
* a rerun makes what backward needs and no output.

Axes: T tokens, K choices, S slots, D model, I expert width, E experts.
"""

from __future__ import annotations

from types import ModuleType

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from . import products_bf16, products_fp8, products_mxfp8, products_quack, products_quack_fp8
from .launch import combine_rows
from .layout import ExpertLayout, expert_layout
from .prepared import prepared
from .saved import SavedUp

PRODUCTS: dict[tuple[str, str], ModuleType] = {
    ("triton", "bf16"): products_bf16,
    ("triton", "fp8"): products_fp8,
    ("triton", "mxfp8"): products_mxfp8,
    ("quack", "bf16"): products_quack,
    ("quack", "fp8"): products_quack_fp8,
}
"""By whose they are (Triton's are torch's where those are faster) and the precision of their operands."""


def fused(
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E 2I D"],
    w_down_EDI: Float[Tensor, "E D I"],
    expert_index_TK: Int[Tensor, "T K"],
    scores_TK: Float32[Tensor, "T K"],
    *,
    residual_TD: Float[Tensor, "T D"] | None = None,
    products: str = "triton",
    precision: str = "bf16",
    save: str = "bf16",
    chunk_tokens: int | None = None,
    rerun: bool = False,
) -> Float[Tensor, "T D"]:
    """See `genomoe.ops.grouped_mlp.grouped_mlp`. Needs Triton, bfloat16 and widths that are multiples of 32.

    Args:
        products: whose, "triton" or "quack"; those in PRODUCTS.
    """
    return _Fused.apply(
        x_TD.contiguous(),
        w_up_E2ID.contiguous(),
        w_down_EDI.contiguous(),
        expert_index_TK,
        scores_TK,
        None if residual_TD is None else residual_TD.contiguous(),
        PRODUCTS[products, precision],
        save if torch.is_grad_enabled() else "recompute",  # without a backward pass nothing is kept for it
        chunk_tokens,
        rerun,
    )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_up, w_down, index, scores, residual, products, save, chunk_tokens, rerun):
        ctx.products, ctx.save = products, save
        ctx.chunks = _chunks(x.shape[0], chunk_tokens)
        kept: list[Tensor | None] = []
        out = torch.empty_like(x)
        measured = prepared(products.measure, w_up), prepared(products.measure, w_down)
        save_now = save if save != "recompute" and any(ctx.needs_input_grad[:5]) else None
        needed = ctx.chunks if save_now or not rerun else []
        up_weight = prepared(products.prepare, w_up, measured[0]) if needed else None
        down_weight = None if rerun else prepared(products.prepare, w_down, measured[1])
        for start, end in needed:
            layout = expert_layout(index[start:end], scores[start:end], w_up.shape[0])
            activation, saved = products.up(x[start:end], up_weight, layout, save_now)
            if not rerun:
                added = None if residual is None else residual[start:end]
                combine_rows(products.down(activation, down_weight, layout), layout, residual=added, out=out[start:end])
            if save_now:
                kept += [*layout, *saved]
            del activation, layout, saved  # not to be held while the next chunk runs
        ctx.save_for_backward(x, w_up, w_down, index, scores, *measured, *kept)
        return out

    @staticmethod
    def backward(ctx, dy):
        products = ctx.products
        x, w_up, w_down, index, scores, *kept = ctx.saved_tensors
        measured, kept = kept[:2], kept[2:]
        dy = dy.contiguous()  # the gradient of a sum is an expanded tensor, which grouped products refuse
        dx, dscores = torch.empty_like(x), torch.empty_like(scores)
        weights = products.prepare_backward(w_up, w_down, *measured)
        up_weight = None if kept else products.prepare(w_up, measured[0])
        accumulator = _Accumulator(len(ctx.chunks))
        for chunk, (start, end) in enumerate(ctx.chunks):
            if kept:
                part = kept[chunk * KEPT_FIELDS : (chunk + 1) * KEPT_FIELDS]
                layout = ExpertLayout(*part[:LAYOUT_FIELDS])
                saved = SavedUp(*part[LAYOUT_FIELDS:])
            else:
                layout = expert_layout(index[start:end], scores[start:end], w_up.shape[0])
                saved = products.up(x[start:end], up_weight, layout, "bf16")[1]  # the activation is let go
            dx_SD, dw_up, dw_down, dscore_S = products.backward(dy[start:end], x[start:end], weights, layout, saved)
            combine_rows(dx_SD, layout, out=dx[start:end])
            dscores[start:end] = dscore_S[layout.slot_TK]
            accumulator.add(dw_up, dw_down)
            del dx_SD, dw_up, dw_down, layout, saved
        dw_up, dw_down = accumulator.total(w_up, w_down)
        dresidual = dy if ctx.needs_input_grad[5] else None
        return dx, dw_up, dw_down, None, dscores, dresidual, None, None, None, None


LAYOUT_FIELDS = len(ExpertLayout._fields)
KEPT_FIELDS = LAYOUT_FIELDS + len(SavedUp._fields)


def _chunks(tokens: int, chunk_tokens: int | None) -> list[tuple[int, int]]:
    step = chunk_tokens or max(tokens, 1)
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


class _Accumulator:
    """Weight gradients over chunks: as they come for a single chunk, in float32 for several."""

    def __init__(self, chunks: int):
        self.several = chunks > 1
        self.sums: tuple[Tensor, ...] | None = None

    def add(self, *gradients: Tensor) -> None:
        if not self.several:
            self.sums = gradients
        elif self.sums is None:
            self.sums = tuple(gradient.float() for gradient in gradients)
        else:
            for total, gradient in zip(self.sums, gradients, strict=True):
                total += gradient

    def total(self, *weights: Tensor) -> tuple[Tensor, ...]:
        if self.sums is None:
            return tuple(torch.zeros_like(weight) for weight in weights)
        return tuple(total.to(weight.dtype) for total, weight in zip(self.sums, weights, strict=True))
