"""What a configuration costs before it is run: parameters, FLOPs, memory by part. First order, one device.

Axes: T tokens of a step on one device, D hidden size, L layers, E experts, K choices, I expert width.
"""

import dataclasses
from collections.abc import Mapping

from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.training.precision import PrecisionConfig

BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted cost of one training step on one device."""

    parameters: int
    """In all."""
    active_parameters: int
    """Of them, those one token passes through."""
    flops_per_token: float
    """Forward and backward, nothing recomputed."""
    context: int
    """Tokens of a window."""
    tokens_per_step: int
    """Tokens of one batch."""
    fixed_bytes: Mapping[str, int]
    """Memory that does not grow with the batch, by part."""
    bytes_per_token: Mapping[str, int]
    """Memory alive at the end of the forward pass, a token, by part."""

    @property
    def total_bytes(self) -> int:
        """Predicted memory of a step."""
        return sum(self.fixed_bytes.values()) + self.tokens_per_step * sum(self.bytes_per_token.values())

    def longest_context(self, memory_bytes: float) -> int:
        """Tokens of the longest single window that fits into `memory_bytes` (0 if not even the fixed part)."""
        left = memory_bytes - sum(self.fixed_bytes.values())
        return max(0, int(left / sum(self.bytes_per_token.values())))


def plan(
    model: ModelConfig,
    *,
    context: int,
    batch_size: int,
    precision: PrecisionConfig,
    kernels: KernelOptions,
) -> Plan:
    """Predict the cost of training `model` on `batch_size` windows of `context` tokens.

    Counted are weights, gradients, AdamW's two moments and what autograd keeps; the allocator's slack and
    kernels' workspaces come on top.
    """
    parts = model.parameters_by_part()
    total = sum(parts.values())
    weight_bytes, compute_bytes = BYTES[precision.parameters], BYTES[precision.compute]
    fixed = {
        "weights": total * weight_bytes,
        "gradients": total * weight_bytes,
        "optimizer moments": 2 * total * weight_bytes,
    }
    if precision.compute != precision.parameters:
        fixed["weights cast for the products"] = total * compute_bytes
    return Plan(
        parameters=total,
        active_parameters=model.num_active_parameters(),
        flops_per_token=model.flops_per_token(context),
        context=context,
        tokens_per_step=context * batch_size,
        fixed_bytes=fixed,
        bytes_per_token=saved_bytes_per_token(model, kernels, compute_bytes),
    )


def saved_bytes_per_token(model: ModelConfig, kernels: KernelOptions, element: int) -> dict[str, int]:
    """Bytes autograd keeps for a token from the forward to the backward pass, by part.

    element: bytes of one activation.
    """
    D, L, K, I = model.hidden_size, model.num_layers, model.top_k, model.expert_size
    heads, kv_heads = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    # x and its norm, twice; q, k, v before and after RoPE; the output; the log-sum-exp of every head
    attention = element * (4 * D + 2 * (heads + 2 * kv_heads) + 2 * heads) + 4 * model.num_heads
    if kernels.save == "recompute":
        experts = element * D
    elif kernels.save == "mxfp8":  # input and up-projection in 8 bits and a scale every 32 values
        experts = int((D + K * 2 * I) * 33 / 32)
    else:  # gathered input, up-projection, activation, output before the weighted sum
        experts = element * K * (D + 2 * I + I + D)
    router = 4 * (3 * model.num_experts + 2 * K) + 8 * K
    return {
        "attention and norms": L * attention,
        "experts": L * experts,
        "router": L * router,
        "loss": element * D + (0 if kernels.loss_chunk else 2 * 4 * model.vocab_size),
    }
