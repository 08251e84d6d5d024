"""RMSNorm (arXiv:1910.07467), alone and with the residual addition before it.

Axis legend: T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from genomoe.ops.pointwise import use_triton
from genomoe.ops.recipe import set_recipe


def rms_norm(x_TD: Float[Tensor, "*T D"], weight_D: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*T D"]:
    """x / rms(x) * weight over the last dimension; float32 inside, the result in the dtype of `x`."""
    x32 = x_TD.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * weight_D.float()).to(x_TD.dtype)


def add_rms_norm(
    x_TD: Float[Tensor, "T D"],
    delta_TD: Float[Tensor, "T D"] | None,
    weight_D: Float[Tensor, " D"],
    eps: float,
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """The residual stream x + delta, and its RMSNorm.

    Returning the stream as an output of the same operation lets one backward pass add both its gradients. The normed
    tensor carries a recipe (`genomoe.ops.recipe`): it can be made again from the stream, which is kept anyway.
    """
    if use_triton(x_TD, backend):
        from genomoe.ops.norm_triton import AddRMSNorm, norm_forward

        stream_TD, y_TD, _ = AddRMSNorm.apply(x_TD, delta_TD, weight_D, eps)
        kept_TD = stream_TD.detach()
        return stream_TD, set_recipe(y_TD, lambda: norm_forward(kept_TD, None, weight_D.detach(), eps)[1])
    stream_TD = x_TD if delta_TD is None else x_TD + delta_TD
    kept_TD = stream_TD.detach()
    y_TD = rms_norm(stream_TD, weight_D, eps)
    return stream_TD, set_recipe(y_TD, lambda: rms_norm(kept_TD, weight_D.detach(), eps))
