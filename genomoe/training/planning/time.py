"""Time of a training step: a roofline.

Products and attention at the parts of the device's peak that `Device` states, passes over memory and the optimizer at
its bandwidth, nothing overlapped; what several devices tell each other is not counted.

Axis legend: T tokens of a step on one device, D hidden size, L layers, E experts, K choices, I expert width.
"""

from __future__ import annotations

from genomoe.model.config import ModelConfig, mean_visible_keys
from genomoe.training.activation import ActivationPolicy
from genomoe.training.planning.device import Device
from genomoe.training.planning.shape import MX, TILE, StepShape

FP8_HALF_WIDTH = 270
"""Expert width at which 8-bit products are half as fast as at any width (H200: 740, 1,060, 1,130 TFLOP/s at 512, 4,096
and 14,336)."""
ATTENTION_HALF_CONTEXT = 700
"""Sequence length at which attention is half as fast as on long ones (H200, heads of 64, forward and backward, 7
products of which two are the scores': 400 TFLOP/s at 8k, 426 at 32k, 431 at 131k)."""
FLASH_SPEED = 0.68
"""Speed of the flash kernel, which sliding windows take, relative to cuDNN's (H200: 294 and 431 TFLOP/s)."""
FLASH4_SPEED = 1.17
"""Speed of FlashAttention-4 relative to cuDNN's kernel (H200: 507 and 434 TFLOP/s on 131k tokens)."""
STREAMS = 100
"""Passes over [T, D] of a layer's step: norms, RoPE, residuals, and what else a measured step takes beside products."""


def _attention_seconds(model: ModelConfig, shape: StepShape, device: Device, window: int | None) -> float:
    """Of one layer's forward pass, at the speed of forward and backward together."""
    seen = min(shape.context, window or shape.context)
    flops = 4.0 * model.num_heads * model.head_size * mean_visible_keys(shape.context, window) * shape.tokens
    rate = device.bf16_flops * device.attention_efficiency * seen / (seen + ATTENTION_HALF_CONTEXT)
    rate *= min(1.35, model.head_size / 64) * (1 if shape.compute_bytes == 2 else 1 / 16)
    if shape.is_flash4(model.head_size):
        return flops / rate / FLASH4_SPEED
    return flops / rate / (FLASH_SPEED if seen < shape.context else 1)


def step_seconds(model: ModelConfig, shape: StepShape, device: Device) -> dict[str, float]:
    """Predicted time of a step by part; see the module's docstring for the roofline."""
    policy = ActivationPolicy.parse(shape.policy)
    T, L, e = shape.tokens, model.num_layers, shape.compute_bytes
    parts = model.flops_by_part(shape.context)
    save = "recompute" if policy.base == "mlp" else shape.kernels.save
    up, forward = 4 / 18, 6 / 18  # of the experts' products, forward and backward
    experts = 1 + (up if save == "recompute" else 0)
    if policy.base == "layer":  # the second run of the fused experts makes what they keep and no output
        experts += forward if not shape.is_fused else 0 if save == "recompute" else up
    products = 1 + (1 / 3 if policy.base == "layer" else 0)
    # forward 2 products, backward 5 (the scores are made again): 3.5 times the forward, where model FLOPs count 3
    passes = 3.5 + (1 if policy.base == "layer" and not policy.attention else 0)
    bf16 = (device.bf16_flops if e == 2 else device.bf16_flops / 16) * device.product_efficiency
    D, I, K, E = model.hidden_size, model.expert_size, model.top_k, model.num_experts
    low = shape.kernels.precision == "fp8" and shape.is_fused
    expert_rate = device.fp8_flops * device.fp8_efficiency * I / (I + FP8_HALF_WIDTH) if low else bf16
    slots = T * K + E * TILE
    # between the products: gather, SwiGLU and combination, forward and backward; the weights prepared for them
    expert_bytes = L * (
        slots * (8 * D + 9 * I) * e * (0.75 if low else 1.0) * experts + 3 * E * I * D * (6 if low else 2)
    )
    attention = sum(_attention_seconds(model, shape, device, model.layer_window(layer)) for layer in range(L))
    streams = STREAMS * (1.25 if policy.base == "layer" else 1.0)
    optimizer = 7 * model.num_parameters() * shape.weight_bytes / shape.shards if shape.optimizer else 0
    moved = {"offload": 2 * e * D * T * L / 50e9, "mxfp8+offload": 2 * MX * D * T * L / 50e9}
    return {
        "experts": T * (parts["experts"] * experts / expert_rate + parts["shared_experts"] * products / bf16)
        + expert_bytes / device.bandwidth,
        "projections, router and head": T * products * (parts["projections"] + parts["router"] + parts["head"]) / bf16,
        "attention": passes * attention,
        "pointwise": T * L * streams * D * e / device.bandwidth,
        "optimizer": optimizer / device.bandwidth,
        # copies overlap the computation but for their excess, which is what a step then waits for
        "offload beyond 50 GB/s": max(0.0, moved.get(policy.store, 0.0) - T * parts["experts"] / bf16),
    }  # fmt: skip
