"""How a model is computed, as opposed to what it computes: a run-time choice, never part of a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Literal

from genomoe.ops.attention import BACKENDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Backends, precision and what is kept for the backward pass. The defaults run anywhere."""

    experts: str = "auto"
    """Backend of `grouped_mlp`: auto, reference, grouped_mm, fused, quack, te."""
    precision: Literal["bf16", "fp8", "mxfp8", "nvfp4"] = "bf16"
    """Of the expert products; bf16 means the weights' own dtype, nvfp4 is Transformer Engine's alone."""
    save: Literal["bf16", "mxfp8", "recompute"] = "bf16"
    """What the experts keep for the backward pass."""
    chunk_tokens: int | None = None
    """Experts and norms run so many tokens at a time; None: all at once."""
    attention: str = "auto"
    """Backend of `genomoe.ops.attention.attention`."""
    pointwise: Literal["auto", "torch", "triton"] = "auto"
    """Norm, RoPE, routing and loss: fused Triton kernels on CUDA, plain PyTorch elsewhere."""
    activation: str = "none"
    """Activation policy by name; `genomoe.training.activation.apply_policy` puts it in force."""
    loss_chunk: int | None = None
    """The loss is taken over so many tokens at a time; None: all at once."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("precision", ("bf16", "fp8", "mxfp8", "nvfp4")),
            ("save", ("bf16", "mxfp8", "recompute")),
            ("pointwise", ("auto", "torch", "triton")),
            ("attention", BACKENDS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"kernels.{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("chunk_tokens", "loss_chunk"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"kernels.{name} must be null or a whole number of at least 1, got {value!r}")
