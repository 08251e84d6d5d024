"""Names and layouts of Hugging Face's Mixtral checkpoints, and ours.

Axis legend: D hidden size, H query heads, G key/value heads, C head size, E experts, I expert width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from genomoe.model.config import ModelConfig
from genomoe.ops.rope import RopeScaling, ntk_theta

PLAIN_NAMES = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
)
LAYER_NAMES = (
    ("attention_norm.weight", "input_layernorm.weight"),
    ("attention.out.weight", "self_attn.o_proj.weight"),
    ("moe_norm.weight", "post_attention_layernorm.weight"),
    ("moe.router.weight", "block_sparse_moe.gate.weight"),
)


def to_mixtral_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of `transformers.MixtralConfig`.

    Raises:
        ValueError: an option Mixtral's arithmetic does not have.
    """
    reasons = config.not_mixtral()
    if reasons:
        raise ValueError(
            f"this model cannot be exported as Mixtral: {', '.join(reasons)} is not part of Mixtral's arithmetic"
        )
    theta: float = config.rope_theta
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "ntk":
        theta = ntk_theta(config.head_size, theta, scaling.factor)  # exactly what the scaling does
    elif scaling is not None:
        rope = {
            "rope_type": scaling.kind,
            "factor": float(scaling.factor),
            "original_max_position_embeddings": scaling.original_max_context,
        }
        if scaling.kind == "yarn":
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            if scaling.attention_factor is not None:
                rope["attention_factor"] = scaling.attention_factor
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.expert_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "initializer_range": config.initializer_std,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "sliding_window": config.window,
        "num_experts_per_tok": config.top_k,
        "num_local_experts": config.num_experts,
        "router_aux_loss_coef": config.aux_loss_coef,
        "rope_parameters": {**rope, "rope_theta": float(theta)},
    }


_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_local_experts",
    "num_experts_per_tok", "max_position_embeddings",
)  # fmt: skip


def from_mixtral_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of a Mixtral `config.json` (transformers 4 or 5).

    Raises:
        ValueError: not a Mixtral configuration, an incomplete one, or a RoPE rule we do not have.
    """
    if fields.get("model_type", "mixtral") != "mixtral":
        raise ValueError(f"config.json describes a {fields['model_type']!r} model, but only 'mixtral' can be imported")
    if fields.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json has hidden_act={fields['hidden_act']!r}, but only 'silu' can be imported")
    missing = [name for name in _REQUIRED if name not in fields]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}: it is no Mixtral configuration, or cut short")
    rope = dict(fields.get("rope_parameters") or {})
    if fields.get("rope_scaling"):
        rope = {**fields["rope_scaling"], **rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = None
    if kind in ("linear", "yarn"):
        original = rope.get("original_max_position_embeddings") or int(
            fields["max_position_embeddings"] / rope["factor"]
        )
        extra: dict[str, Any] = {}
        if kind == "yarn":
            extra = {
                "beta_fast": float(rope.get("beta_fast") or 32),
                "beta_slow": float(rope.get("beta_slow") or 1),
                "attention_factor": rope.get("attention_factor"),
            }
        scaling = RopeScaling(kind=kind, factor=rope["factor"], original_max_context=original, **extra)
    elif kind != "default":
        raise ValueError(f"config.json has RoPE rule {kind!r}, but only default, linear and yarn can be imported")
    heads = fields["num_attention_heads"]
    return ModelConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_size=fields.get("head_dim") or fields["hidden_size"] // heads,
        expert_size=fields["intermediate_size"],
        num_experts=fields["num_local_experts"],
        top_k=fields["num_experts_per_tok"],
        rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 1e6))),
        rope_scaling=scaling,
        max_context=fields["max_position_embeddings"],
        rms_norm_eps=fields.get("rms_norm_eps", 1e-5),
        tie_embeddings=fields.get("tie_word_embeddings", False),
        window=fields.get("sliding_window"),
        aux_loss_coef=fields.get("router_aux_loss_coef", 0.001),
        initializer_std=fields.get("initializer_range", 0.02),
    )


def to_mixtral_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Tensors under the names of a published Mixtral checkpoint (one tensor per expert: w1 gate, w3 up, w2 down)."""
    out = {theirs: state[ours] for ours, theirs in PLAIN_NAMES if ours in state}
    if config.tie_embeddings:
        out.pop("lm_head.weight", None)
    C = config.head_size
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, their_name in LAYER_NAMES:
            out[theirs + their_name] = state[ours + name]
        q, k, v = state[ours + "attention.qkv.weight"].split(
            [config.num_heads * C, config.num_kv_heads * C, config.num_kv_heads * C]
        )
        for name, value in (("q", q), ("k", k), ("v", v)):
            out[f"{theirs}self_attn.{name}_proj.weight"] = value
        for expert in range(config.num_experts):
            stem = f"{theirs}block_sparse_moe.experts.{expert}."
            gate, up = state[ours + "moe.experts.w_up"][expert].chunk(2)
            out[stem + "w1.weight"], out[stem + "w3.weight"] = gate, up
            out[stem + "w2.weight"] = state[ours + "moe.experts.w_down"][expert]
    return out


def from_mixtral_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Our tensors from those of a Mixtral checkpoint, with one tensor per expert or with the experts stacked.

    The router becomes float32.

    Raises:
        ValueError: a tensor is missing (the message names it), or one is left over.
    """
    left = {re.sub(r"\.mlp\.", ".block_sparse_moe.", name): value for name, value in state.items()}

    def take(name: str) -> Tensor:
        if name not in left:
            raise ValueError(f"the Mixtral checkpoint has no tensor {name!r}: it is incomplete or of another model")
        return left.pop(name)

    out: dict[str, Tensor] = {}
    for ours, theirs in PLAIN_NAMES:
        if theirs == "lm_head.weight" and theirs not in left and config.tie_embeddings:
            out[ours] = out["embed.weight"]
        else:
            out[ours] = take(theirs)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        for name, their_name in LAYER_NAMES:
            out[ours + name] = take(theirs + their_name)
        out[ours + "moe.router.weight"] = out[ours + "moe.router.weight"].float()
        out[ours + "attention.qkv.weight"] = torch.cat(
            [take(f"{theirs}self_attn.{name}_proj.weight") for name in ("q", "k", "v")]
        )
        experts = theirs + "block_sparse_moe.experts."
        if experts + "gate_up_proj" in left:
            out[ours + "moe.experts.w_up"] = take(experts + "gate_up_proj")
            out[ours + "moe.experts.w_down"] = take(experts + "down_proj")
            continue
        up, down = [], []
        for expert in range(config.num_experts):
            up.append(torch.cat([take(f"{experts}{expert}.w1.weight"), take(f"{experts}{expert}.w3.weight")]))
            down.append(take(f"{experts}{expert}.w2.weight"))
        out[ours + "moe.experts.w_up"], out[ours + "moe.experts.w_down"] = torch.stack(up), torch.stack(down)
    extra = [name for name in left if "rotary_emb" not in name]
    if extra:
        raise ValueError(f"the Mixtral checkpoint has a tensor Mixtral's arithmetic does not use: {extra[0]!r}")
    return out
