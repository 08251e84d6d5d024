"""What the cost of a training step depends on, beside the architecture."""

from __future__ import annotations

import dataclasses

import torch

from genomoe.model.kernels import KernelOptions
from genomoe.ops.attention_flash4 import flash4_pays
from genomoe.training.optim import OptimConfig
from genomoe.training.precision import PrecisionConfig

BYTES = {"float32": 4, "bfloat16": 2}
INT8_MOMENT = 1 + 4 / 256
"""Bytes per value of an 8-bit optimizer state: one, and a float32 scale for every 256."""
MX = 33 / 32
"""Bytes per value in MXFP8: one, and a scale for every 32."""
TILE = 128
"""Rows to which the fused experts pad each expert's tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """Everything the cost of a step depends on, beside the architecture."""

    context: int
    """Tokens of a window."""
    batch: int
    """Windows of a step on the device."""
    kernels: KernelOptions = dataclasses.field(default_factory=KernelOptions)
    policy: str = "none"
    """Activation policy."""
    weight_bytes: int = 2
    """Of a stored weight and of its gradient."""
    moment_bytes: float | None = None
    """Of each of a weight's two moments; None: as the weight."""
    compute_bytes: int = 2
    """Of an activation."""
    optimizer: bool = True
    """With AdamW's two moments."""
    shards: int = 1
    """Devices over which weights, gradients and moments are divided (`parallel=fsdp`)."""

    @property
    def tokens(self) -> int:
        return self.context * self.batch

    @property
    def is_fused(self) -> bool:
        """Whether the experts are fused, on a GPU at least."""
        return self.kernels.experts in ("auto", "fused", "quack", "te") and self.compute_bytes == 2

    def is_flash4(self, head_size: int) -> bool:
        """Whether attention is FlashAttention-4's, as far as the packages and the GPU of this machine tell."""
        auto = self.kernels.attention == "auto" and flash4_pays(torch.bfloat16, head_size)
        return self.compute_bytes == 2 and (auto or self.kernels.attention == "flash4")


def step_shape(
    *,
    context: int,
    batch_size: int,
    precision: PrecisionConfig,
    kernels: KernelOptions,
    optim: OptimConfig,
    shards: int = 1,
) -> StepShape:
    """The shape of a training step on `batch_size` windows of `context` tokens under a run's settings."""
    return StepShape(
        context=context,
        batch=batch_size,
        kernels=kernels,
        policy=kernels.activation,
        weight_bytes=BYTES[precision.parameters],
        moment_bytes=INT8_MOMENT if optim.moments == "int8" else None,
        compute_bytes=BYTES[precision.compute],
        shards=shards,
    )
