"""RMSNorm (arXiv:1910.07467), alone and with the residual addition before it.

Axis legend: T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def rms_norm_reference(
    x_TD: Float[Tensor, "*T D"], weight_D: Float[Tensor, " D"], eps: float
) -> Float[Tensor, "*T D"]:
    """x / rms(x) * weight; float32 inside, the result in the dtype of `x`."""
    x32 = x_TD.float()
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed * weight_D.float()).to(x_TD.dtype)


def rms_norm(
    x_TD: Float[Tensor, "*T D"], weight_D: Float[Tensor, " D"], eps: float, *, backend: str = "auto"
) -> Float[Tensor, "*T D"]:
    """RMSNorm over the last dimension."""
    return rms_norm_reference(x_TD, weight_D, eps)


def add_rms_norm(
    x_TD: Float[Tensor, "T D"],
    delta_TD: Float[Tensor, "T D"] | None,
    weight_D: Float[Tensor, " D"],
    eps: float,
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T D"]]:
    """The residual stream x + delta, and its RMSNorm.

    Returning the stream as an output of the same operation lets one backward pass add both its gradients.
    """
    if delta_TD is not None:
        x_TD = x_TD + delta_TD
    return x_TD, rms_norm(x_TD, weight_D, eps, backend=backend)
