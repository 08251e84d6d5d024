"""What a configuration costs before it is run, on one device: parameters, FLOPs, memory by part, time, longest context.

Axis legend: T tokens of a step on one device, D hidden size, L layers, H query heads, G key/value heads, C head size,
E experts, K choices, I expert width, V vocabulary.

Memory is counted from what the operations allocate (see `genomoe.ops` and `genomoe.training.activation`), at the three
moments where a step can peak:

* `loss`: all saved activations, and the head;
* `last layer`: the first to go backward: all saved activations, and one layer's transients and gradients;
* `first layer`: the last to go backward: all gradients, and one layer's activations and transients.

Step time is a roofline: products and attention at the parts of the device's peak that `Device` states, passes over
memory and the optimizer at its bandwidth, nothing overlapped; what several devices tell each other is not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from genomoe.model.config import ModelConfig, mean_visible_keys
from genomoe.model.kernels import KernelOptions
from genomoe.ops.attention_kernels import REACH, num_head_groups
from genomoe.ops.loss import LOGITS_AT_ONCE
from genomoe.training.activation import POLICIES, ActivationPolicy
from genomoe.training.optim import OptimConfig
from genomoe.training.options import ConfigError, nearest
from genomoe.training.precision import PrecisionConfig

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
INT8_MOMENT = 1 + 4 / 256
"""Bytes per value of an 8-bit optimizer state: one, and a float32 scale for every 256."""
MX = 33 / 32
"""Bytes per value in MXFP8: one, and a scale for every 32."""
TILE = 128
"""Rows to which the fused experts pad each expert's tokens."""
ALLOCATOR_SLACK = 0.02
"""Share of a device's memory that blocks of unequal size leave unusable, beside the context's own `CONTEXT_BYTES`."""
FP8_HALF_WIDTH = 270
"""Expert width at which 8-bit products are half as fast as at any width (H200: 740, 1,060, 1,130 TFLOP/s at 512, 4,096
and 14,336)."""
ATTENTION_HALF_CONTEXT = 700
"""Sequence length at which attention is half as fast as on long ones (H200, heads of 64, forward and backward, 7
products of which two are the scores': 400 TFLOP/s at 8k, 426 at 32k, 431 at 131k)."""
FLASH_SPEED = 0.68
"""Speed of the flash kernel, which sliding windows take, relative to cuDNN's (H200: 294 and 431 TFLOP/s)."""
STREAMS = 100
"""Passes over [T, D] of a layer's step: norms, RoPE, residuals, and what else a measured step takes beside products."""
CONTEXT_BYTES = GIB
"""CUDA context, library handles and workspaces."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Memory and peak rates of a device; dense, no sparsity."""

    name: str
    memory_bytes: float
    bf16_flops: float
    """Peak of bfloat16 products, FLOP/s."""
    fp8_flops: float
    """Peak of 8-bit products, FLOP/s; that of bfloat16 where there are none."""
    bandwidth: float
    """Bytes/s of a copy (read and written bytes both counted)."""
    product_efficiency: float = 0.87
    """Part of the bfloat16 peak that large products reach."""
    fp8_efficiency: float = 0.76
    """Part of the 8-bit peak that products of wide experts reach; see `FP8_HALF_WIDTH`."""
    attention_efficiency: float = 0.567
    """Part of the bfloat16 peak that attention with heads of 64 reaches on long sequences, forward and backward."""

    @classmethod
    def named(cls, name: str) -> Device:
        """A known device.

        Raises:
            ConfigError: it is not known.
        """
        if name.lower() not in DEVICES:
            known = ", ".join(DEVICES)
            raise ConfigError(f"the GPU {name!r} is not known{nearest(name.lower(), DEVICES)} Known: {known}.")
        return DEVICES[name.lower()]

    @classmethod
    def detect(cls) -> Device | None:
        """The first CUDA device, with the rates of the known one it resembles; None without one."""
        if not torch.cuda.is_available():
            return None
        properties = torch.cuda.get_device_properties(0)
        for key, device in DEVICES.items():
            if key in properties.name.lower().replace("-", " ").split():
                return dataclasses.replace(device, name=properties.name, memory_bytes=properties.total_memory)
        guess = DEVICES["a100"]
        return dataclasses.replace(guess, name=properties.name, memory_bytes=properties.total_memory)

    @property
    def roofline(self) -> str:
        """The rates that predicted times assume, in words."""
        return (
            f"products at {self.product_efficiency:.0%} of {self.bf16_flops / 1e12:.0f} TFLOP/s bf16, up to "
            f"{self.fp8_efficiency:.0%} of {self.fp8_flops / 1e12:.0f} fp8, attention up to "
            f"{self.attention_efficiency:.0%} of bf16 with heads of 64, "
            f"passes at {self.bandwidth / 1e12:.2f} TB/s, nothing overlapped"
        )

    @property
    def usable_bytes(self) -> float:
        """Memory a step may take."""
        return self.memory_bytes * (1 - ALLOCATOR_SLACK) - CONTEXT_BYTES


DEVICES = {
    # the H200 as measured on one (8192^3 products, a 4 GiB copy); the others: their data sheets times the same ratios
    "h200": Device(name="H200", memory_bytes=139.8 * GIB, bf16_flops=767e12, fp8_flops=1484e12, bandwidth=4.28e12),
    "h100": Device(name="H100", memory_bytes=79.1 * GIB, bf16_flops=767e12, fp8_flops=1484e12, bandwidth=2.9e12),
    "b200": Device(name="B200", memory_bytes=178.0 * GIB, bf16_flops=1700e12, fp8_flops=3400e12, bandwidth=7.0e12),
    "a100": Device(name="A100", memory_bytes=79.1 * GIB, bf16_flops=270e12, fp8_flops=270e12, bandwidth=1.7e12),
    "l40s": Device(name="L40S", memory_bytes=44.4 * GIB, bf16_flops=300e12, fp8_flops=600e12, bandwidth=0.78e12),
}  # fmt: skip
"""Known devices by name."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted cost of one training step on one device."""

    shape: StepShape
    parameters: int
    """In all."""
    active_parameters: int
    """Of them, those one token passes through."""
    flops_per_token: Mapping[str, float]
    """Forward and backward, nothing recomputed, by part."""
    memory: Mapping[str, int]
    """Bytes at the moment of the peak, by part."""
    moment: str
    """When that is: loss, last layer or first layer."""
    saved_bytes_per_token_layer: int
    """What a layer keeps from its forward to its backward pass."""
    seconds: Mapping[str, float]
    """Predicted time of a step by part; empty without a device."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of a step."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step."""
        return sum(self.seconds.values())


# ---- memory --------------------------------------------------------------------------------------------------


def layer_saved_bytes(model: ModelConfig, shape: StepShape, layer: int = 0) -> int:
    """Bytes per token that one layer keeps between its passes, under the policy."""
    del layer  # every layer keeps as much
    policy = ActivationPolicy.parse(shape.policy)
    D, e = model.hidden_size, shape.compute_bytes
    if policy.base == "layer":
        stored = {"plain": e * D, "mxfp8": D * MX}.get(policy.store, 0.0)  # offloaded: nothing on the device
        attention = e * model.num_heads * model.head_size + 4 * model.num_heads if policy.attention else 0
        return int(stored + model.top_k + attention)
    return _plain_saved_bytes(model, shape, recipes=policy.base == "mlp")


def _plain_saved_bytes(model: ModelConfig, shape: StepShape, *, recipes: bool, save: str | None = None) -> int:
    """What autograd keeps of a layer, per token; `recipes`: norms and experts are made again."""
    D, E, K, e = model.hidden_size, model.num_experts, model.top_k, shape.compute_bytes
    heads, kv_heads = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    attention = e * (heads + 2 * kv_heads) + e * heads + 4 * model.num_heads
    if model.qk_norm:
        attention += e * (heads + 2 * kv_heads)
    streams = 2 * e * D + 8
    normed = 0 if recipes else 2 * e * D
    router = 4 * E + (8 + 4) * K
    shared = e * (4 * model.num_shared_experts * model.expert_size) if model.num_shared_experts else 0
    experts = _experts_saved_bytes(model, shape, "recompute" if recipes else save or shape.kernels.save)
    return int(attention + streams + normed + router + shared + experts)


def _experts_saved_bytes(model: ModelConfig, shape: StepShape, save: str) -> float:
    """Beside the experts' input, which is the norm's output, their choice and their scores."""
    D, K, I, e = model.hidden_size, model.top_k, model.expert_size, shape.compute_bytes
    if save == "recompute":
        return 0
    if _is_fused(shape):
        layout = 4 * K + 8 * K
        tokens = min(shape.kernels.chunk_tokens or shape.tokens, shape.tokens)
        slots = K + model.num_experts * TILE / tokens  # per token, the padding of each expert's among them
        return layout + slots * 2 * I * (MX if save == "mxfp8" else e)
    # gathered input, up-projection, silu(gate), activation, output and its float32 copy
    return e * K * (2 * D + 4 * I) + 4 * K * D + 24 * K


def _is_fused(shape: StepShape) -> bool:
    return shape.kernels.experts in ("auto", "fused", "te") and shape.compute_bytes == 2


def _experts_transient_bytes(model: ModelConfig, shape: StepShape) -> int:
    """Buffers of the experts' backward pass that exist for one chunk of tokens, and the weight gradients it makes."""
    D, K, I, E, e = model.hidden_size, model.top_k, model.expert_size, model.num_experts, shape.compute_bytes
    tokens = min(shape.kernels.chunk_tokens or shape.tokens, shape.tokens)
    slots = tokens * K + E * TILE
    save = "recompute" if shape.policy == "mlp" else shape.kernels.save
    weights = 3 * E * I * D
    sums = 4 * weights if tokens < shape.tokens else 0  # over chunks, in float32
    again = slots * e * 2 * I if save == "recompute" else 0  # gate and up
    activation = slots * e * (D + 4 * I)  # dy, da, dh, and the activation made again
    gradients = slots * e * (2 * D + 2 * I) + e * weights  # dh, dx and x; the weights' gradients
    if shape.weight_bytes != e:
        gradients = max(gradients, (e + shape.weight_bytes) * weights)  # and cast
    transposed = e * E * I * D  # the down-projection
    return int(max(activation, gradients) + again + sums + transposed)


def _attention_transient_bytes(model: ModelConfig, shape: StepShape) -> int:
    """Per token, in attention's backward pass: its output's gradient, dq, dk, dv, and a float32 sum of dq.

    Past `REACH` for one group of heads at a time, on copies of its part of q, k, v, the output and its gradient.
    """
    heads, kv_heads = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    joint = heads + 2 * kv_heads
    gradients = shape.compute_bytes * (heads + joint)
    if shape.tokens * joint <= REACH:
        return gradients + 4 * heads
    groups = num_head_groups(shape.tokens * heads, model.num_kv_heads)
    copies = joint + 2 * heads if groups > 1 else joint
    return gradients + (shape.compute_bytes * (copies + joint) + 4 * heads) // groups


def memory_at_peak(model: ModelConfig, shape: StepShape) -> tuple[dict[str, int], str]:
    """Bytes by part at the moment of the peak, and which moment that is."""
    parts = model.parameters_by_part()
    total, router = sum(parts.values()), parts["router"]
    w, T, L, D, e = shape.weight_bytes, shape.tokens, model.num_layers, model.hidden_size, shape.compute_bytes
    n = shape.shards

    def stored(count: float, routers: float) -> int:
        return int((count - routers) * w + routers * 4) // n

    per_layer = (total - parts["embedding"] - parts["head"] - D) / L
    experts = parts["experts"] / L
    fixed = {"weights": stored(total, router)}
    if n > 1:
        # embedding and head, the layer that runs, the next on its way, and a layer's gradients on theirs
        layer = (per_layer - experts) * w + experts * e
        fixed["weights and gradients not divided"] = int((total - per_layer * L) * w + 2 * layer + per_layer * w)
    if shape.optimizer:
        moment_bytes = shape.moment_bytes
        each = stored(total, router) if moment_bytes is None else moment_bytes * total / n
        fixed["optimizer moments"] = int(2 * each)
    if shape.weight_bytes != shape.compute_bytes:
        # autograd keeps the cast weights of every layer, unless layers run again
        layers = 1 if ActivationPolicy.parse(shape.policy).base == "layer" else L
        # (divided experts are gathered as they are multiplied)
        cast = per_layer if n == 1 else per_layer - experts
        fixed["weights cast for the products"] = int(cast * layers * e)
    fixed["RoPE table"] = shape.context * model.head_size * 4

    saved = layer_saved_bytes(model, shape) * T
    policy = ActivationPolicy.parse(shape.policy)
    block = e * D * T  # one [T, D] tensor
    again = fetched = 0
    if policy.base == "layer":
        # the layer runs again and keeps everything for its own backward pass, its input restored if it was not plain
        kept = _plain_saved_bytes(model, shape, recipes=False)
        if policy.attention:
            kept -= e * model.num_heads * model.head_size + 4 * model.num_heads
        again = T * kept - (block if policy.store == "plain" else 0)
        if "offload" in policy.store:
            fetched = int(T * D * MX) if "mxfp8" in policy.store else block
    recipes = policy.base == "mlp"
    experts_kept = T * _experts_saved_bytes(model, shape, "recompute" if recipes else shape.kernels.save)
    layer_experts = int(experts * w)
    transient = max(
        # gradients of the layer's output and of the experts' input, and that input if it is made again
        (3 if recipes else 2) * block + _experts_transient_bytes(model, shape),
        # by then the experts' part of what the layer kept is gone, and their gradients are there
        layer_experts
        + block + T * _attention_transient_bytes(model, shape) - (1 if recipes else 2) * block - experts_kept,
    )  # fmt: skip
    head_T = min(T, shape.kernels.loss_chunk or max(1, LOGITS_AT_ONCE // model.vocab_size))
    head = T * (3 * e * D + 4) + head_T * model.vocab_size * (4 + 4 + e)
    inputs = 8 * 2 * T + 4 * T
    moments = {
        "loss": {"saved activations": L * saved, "head and loss": head},
        "last layer": {
            "saved activations": L * saved,
            "one layer run again": again,
            "transients": fetched + transient,
            "gradients": stored(parts["head"] + D, 0),
        },
        "first layer": {
            "saved activations": saved,
            "one layer run again": again,
            "transients": transient,
            "gradients": stored(total - per_layer - parts["embedding"], router * (L - 1) / L),
        },
        "optimizer": {"gradients": stored(total, router)},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    memory = {**fixed, "tokens and labels": inputs, **moments[moment]}
    return {name: int(size) for name, size in memory.items() if size}, moment


def predict_peak(
    model: ModelConfig,
    *,
    batch: int,
    context: int,
    kernels: KernelOptions,
    policy: str = "none",
    optimizer: bool = True,
) -> int:
    """Predicted peak bytes of a bfloat16 training step."""
    shape = StepShape(context=context, batch=batch, kernels=kernels, policy=policy, optimizer=optimizer)
    return sum(memory_at_peak(model, shape)[0].values())


# ---- time ----------------------------------------------------------------------------------------------------


def _attention_seconds(model: ModelConfig, shape: StepShape, device: Device, window: int | None) -> float:
    """Of one layer's forward pass, at the speed of forward and backward together."""
    seen = min(shape.context, window or shape.context)
    flops = 4.0 * model.num_heads * model.head_size * mean_visible_keys(shape.context, window) * shape.tokens
    rate = device.bf16_flops * device.attention_efficiency * seen / (seen + ATTENTION_HALF_CONTEXT)
    rate *= min(1.35, model.head_size / 64) * (1 if shape.compute_bytes == 2 else 1 / 16)
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
        experts += forward if not _is_fused(shape) else 0 if save == "recompute" else up
    products = 1 + (1 / 3 if policy.base == "layer" else 0)
    # forward 2 products, backward 5 (the scores are made again): 3.5 times the forward, where model FLOPs count 3
    passes = 3.5 + (1 if policy.base == "layer" and not policy.attention else 0)
    bf16 = (device.bf16_flops if e == 2 else device.bf16_flops / 16) * device.product_efficiency
    D, I, K, E = model.hidden_size, model.expert_size, model.top_k, model.num_experts
    low = shape.kernels.precision == "fp8" and _is_fused(shape)
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


# ---- plans and searches --------------------------------------------------------------------------------------


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


def plan(model: ModelConfig, shape: StepShape, device: Device | None = None) -> Plan:
    """Predict the cost of a step of this shape."""
    memory, moment = memory_at_peak(model, shape)
    return Plan(
        shape=shape,
        parameters=model.num_parameters(),
        active_parameters=model.num_active_parameters(),
        flops_per_token=model.flops_by_part(shape.context),
        memory=memory,
        moment=moment,
        saved_bytes_per_token_layer=layer_saved_bytes(model, shape),
        seconds=step_seconds(model, shape, device) if device else {},
    )


def longest_context(model: ModelConfig, shape: StepShape, memory_bytes: float, *, multiple: int = 256) -> int:
    """Tokens of the longest window, a multiple of `multiple`, whose step is predicted to fit (0 if none does).

    The window may exceed `model.max_context`: the answer is about memory.
    """

    def fits(units: int) -> bool:
        longer = dataclasses.replace(shape, context=units * multiple)
        return sum(memory_at_peak(model, longer)[0].values()) <= memory_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * multiple


def longest_context_by_policy(model: ModelConfig, shape: StepShape, memory_bytes: float) -> list[dict[str, str | int]]:
    """For every policy, and for `none` every way the experts save, the longest window that fits."""
    rows: list[dict[str, str | int]] = []
    for policy in POLICIES:
        ways = ("bf16", "mxfp8", "recompute") if policy == "none" else ("recompute",)
        for save in ways:
            if save == "mxfp8" and not _is_fused(shape):
                continue
            kernels = dataclasses.replace(shape.kernels, save=save, chunk_tokens=32768, activation=policy)  # type: ignore[arg-type]
            one = dataclasses.replace(shape, batch=1, kernels=kernels, policy=policy)
            rows.append({"policy": policy, "save": save, "tokens": longest_context(model, one, memory_bytes)})
    return rows


def alternatives(model: ModelConfig, shape: StepShape, device: Device) -> Iterator[StepShape]:
    """The same step under every policy and way of saving, the fastest (by prediction) first."""
    shapes = []
    for policy in POLICIES:
        for save in ("bf16", "mxfp8", "recompute"):
            for chunk in (None, 32768):
                if save == "mxfp8" and not _is_fused(shape):
                    continue
                kernels = dataclasses.replace(
                    shape.kernels,
                    save=save,
                    chunk_tokens=chunk,
                    activation=policy,  # type: ignore[arg-type]
                )
                shapes.append(dataclasses.replace(shape, kernels=kernels, policy=policy))
    return iter(sorted(shapes, key=lambda one: sum(step_seconds(model, one, device).values())))


def cheapest_that_fits(model: ModelConfig, shape: StepShape, device: Device) -> StepShape | None:
    """The fastest alternative whose predicted peak fits the device, or None."""
    for one in alternatives(model, shape, device):
        if sum(memory_at_peak(model, one)[0].values()) <= device.usable_bytes:
            return one
    return None


def overrides_of(shape: StepShape) -> str:
    """The command-line overrides that choose a shape's policy."""
    chunk = "null" if shape.kernels.chunk_tokens is None else shape.kernels.chunk_tokens
    return f"activation.policy={shape.policy} activation.save={shape.kernels.save} activation.chunk_tokens={chunk}"


def require_fit(model: ModelConfig, shape: StepShape, device: Device) -> None:
    """Refuse a step that is predicted not to fit, before anything is allocated.

    Raises:
        ConfigError: naming the predicted peak, what there is, and the cheapest policy that would fit.
    """
    peak = sum(memory_at_peak(model, shape)[0].values())
    if peak <= device.usable_bytes:
        return
    better = cheapest_that_fits(model, shape, device)
    if better is not None:
        advice = f"the fastest setting predicted to fit is {overrides_of(better)}"
    else:
        advice = (
            "no activation policy makes it fit: shorten data.context_length, lower data.batch_size or divide the "
            "model over (more) devices with parallel=fsdp"
        )
    raise ConfigError(
        f"a step of {shape.batch} x {shape.context} tokens is predicted to need {peak / GIB:.1f} GiB of the "
        f"{device.usable_bytes / GIB:.1f} GiB usable on {device.name}: {advice}."
    )
