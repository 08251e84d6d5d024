"""A linear map whose weight follows its input's dtype."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Projection(nn.Linear):
    """`nn.Linear` that rounds its weight to the dtype of the input, so that float32 weights serve bf16 activations.

    A subclass, so that adapters which look for `nn.Linear` (LoRA) find it.
    """

    def forward(self, input: Float[Tensor, "T D"]) -> Float[Tensor, "T O"]:
        return F.linear(input, self.weight.to(input.dtype))
