"""Memory of a training step, counted from what the operations allocate (see `genomoe.ops` and
`genomoe.training.activation`).

A step can peak at three moments:

* `loss`: all saved activations, and the head;
* `last layer`: the first to go backward: all saved activations, and one layer's transients and gradients;
* `first layer`: the last to go backward: all gradients, and one layer's activations and transients.

Axis legend: T tokens of a step on one device, D hidden size, L layers, E experts, K choices, I expert width.
"""

from __future__ import annotations

from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.ops.attention_kernels import REACH, num_head_groups
from genomoe.ops.loss import LOGITS_AT_ONCE
from genomoe.training.activation import ActivationPolicy
from genomoe.training.planning.shape import MX, TILE, StepShape


def layer_saved_bytes(model: ModelConfig, shape: StepShape) -> int:
    """Bytes per token that one layer keeps between its passes, under the policy."""
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
    if shape.is_fused:
        layout = 4 * K + 8 * K
        tokens = min(shape.kernels.chunk_tokens or shape.tokens, shape.tokens)
        slots = K + model.num_experts * TILE / tokens  # per token, the padding of each expert's among them
        return layout + slots * 2 * I * (MX if save == "mxfp8" else e)
    # gathered input, up-projection, silu(gate), activation, output and its float32 copy
    return e * K * (2 * D + 4 * I) + 4 * K * D + 24 * K


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

    FlashAttention-4 sums dk and dv in float32 too where several query heads share them.

    Past `REACH` for one group of heads at a time, on copies of its part of q, k, v, the output and its gradient.
    """
    heads, kv_heads = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    joint = heads + 2 * kv_heads
    gradients = shape.compute_bytes * (heads + joint)
    sums = 4 * heads
    if heads != kv_heads and shape.is_flash4(model.head_size):
        sums += 8 * kv_heads
    if shape.tokens * joint <= REACH:
        return gradients + sums
    groups = num_head_groups(shape.tokens * heads, model.num_kv_heads)
    copies = joint + 2 * heads if groups > 1 else joint
    return gradients + (shape.compute_bytes * (copies + joint) + sums) // groups


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
    moments: dict[str, dict[str, float]] = {
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
