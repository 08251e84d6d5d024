"""The architecture of a model as one frozen value that checks itself and counts its own cost.

Axis legend of the package: B batch, S sequence, T tokens (B*S, or packed), D hidden size, H query heads,
G key/value heads, C head size, E experts, K experts chosen per token, I expert width, V vocabulary, L layers.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, Literal

from genomoe.ops.rope import RopeScaling

FORMAT_VERSION = 1


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"model.{name} must be a whole number of at least 1, got {value!r}")


def _fraction(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"model.{name} must be a finite number of at least 0, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A mixture-of-experts decoder. The defaults of the optional fields are exactly Mixtral's arithmetic."""

    vocab_size: int = 16
    """V: token ids are 0 .. V-1."""
    hidden_size: int
    """D: width of the residual stream."""
    num_layers: int
    num_heads: int
    """H: query heads."""
    num_kv_heads: int
    """G: key/value heads; H must be a multiple."""
    head_size: int
    """C: even, because RoPE rotates pairs."""
    expert_size: int
    """I: width of one expert's SwiGLU."""
    num_experts: int
    """E."""
    top_k: int
    """K: experts per token, at most E."""
    rope_theta: float = 1e6
    """RoPE base."""
    rope_scaling: RopeScaling | None = None
    """How positions beyond the pretraining context are mapped; see `genomoe.ops.rope`."""
    max_context: int = 8192
    """Longest sequence, in tokens, the model accepts."""
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    qk_norm: bool = False
    """RMSNorm on every query and key head before RoPE (not Mixtral)."""
    num_shared_experts: int = 0
    """Experts every token passes through, besides its K routed ones (not Mixtral)."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """Softmax over E, or independent sigmoids (not Mixtral); the K chosen are renormalised to sum to 1."""
    router_bias_balancing: bool = False
    """Loss-free balancing (arXiv:2408.15664): a bias per expert steers the choice, never the scores (not Mixtral)."""
    router_bias_rate: float = 1e-3
    """Step of that bias per optimizer step."""
    window: int | None = None
    """Sliding window in tokens, the token itself included; None attends to everything before."""
    global_every: int | None = None
    """With a window: every n-th layer (layers n-1, 2n-1, ...) attends globally; None: no layer does."""
    aux_loss_coef: float = 0.01
    """Weight of the Switch load-balancing loss."""
    z_loss_coef: float = 1e-3
    """Weight of the router z-loss (ST-MoE)."""
    initializer_std: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size",
            "expert_size", "num_experts", "top_k", "max_context",
        ):  # fmt: skip
            _positive(name, getattr(self, name))
        for name in ("rms_norm_eps", "aux_loss_coef", "z_loss_coef", "initializer_std", "router_bias_rate"):
            _fraction(name, getattr(self, name))
        if isinstance(self.rope_scaling, Mapping):
            object.__setattr__(self, "rope_scaling", RopeScaling.from_dict(self.rope_scaling))
        if not isinstance(self.rope_theta, (int, float)) or not self.rope_theta > 1:
            raise ValueError(f"model.rope_theta must be greater than 1, got {self.rope_theta!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={self.num_kv_heads}: "
                "every key/value head serves the same number of query heads"
            )
        if self.head_size % 2:
            raise ValueError(f"model.head_size={self.head_size} is odd, but RoPE rotates pairs: make it even")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"model.top_k={self.top_k} is greater than model.num_experts={self.num_experts}: "
                "a token cannot be sent to more experts than there are"
            )
        if isinstance(self.num_shared_experts, bool) or self.num_shared_experts < 0:
            raise ValueError(f"model.num_shared_experts must be at least 0, got {self.num_shared_experts!r}")
        if self.router_scores not in ("softmax", "sigmoid"):
            raise ValueError(f"model.router_scores must be 'softmax' or 'sigmoid', got {self.router_scores!r}")
        if self.window is not None:
            _positive("window", self.window)
        if self.global_every is not None:
            _positive("global_every", self.global_every)
            if self.window is None:
                raise ValueError("model.global_every is set but model.window is not: every layer is global already")
        if self.rope_scaling is not None and self.max_context > self.rope_scaling.longest_context:
            raise ValueError(
                f"model.max_context={self.max_context} is longer than the RoPE scaling covers "
                f"({self.rope_scaling.longest_context}): raise rope_scaling.factor to at least "
                f"{math.ceil(self.max_context / self.rope_scaling.original_max_context)}"
            )

    # ---- presets and dicts -------------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ModelConfig:
        """A named architecture, with any field changed: `ModelConfig.preset("genos-1.2b", max_context=131072)`."""
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"there is no model preset {name!r}{hint} Presets: {', '.join(sorted(PRESETS))}")
        return cls.from_dict({**PRESETS[name], **changes})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Build from plain values; a misspelt or missing field is an error that names the nearest one."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean model.{near[0]}?" if near else f"fields: {', '.join(known)}"
                raise ValueError(f"there is no field model.{name}; {hint}")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in fields]
        if missing:
            raise ValueError(f"the model configuration lacks {', '.join('model.' + n for n in missing)}")
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values; `ModelConfig.from_dict(config.to_dict()) == config`."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> ModelConfig:
        """The same architecture with some fields changed, checked again."""
        return self.from_dict({**self.to_dict(), **changes})

    # ---- derived -----------------------------------------------------------------------------------------

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of one layer, or None if it attends globally."""
        if self.global_every is not None and (layer + 1) % self.global_every == 0:
            return None
        return self.window

    def not_mixtral(self) -> list[str]:
        """The options in use that Mixtral's arithmetic cannot express; empty if it converts."""
        reasons = []
        if self.qk_norm:
            reasons.append("qk_norm=True")
        if self.num_shared_experts:
            reasons.append(f"num_shared_experts={self.num_shared_experts}")
        if self.router_scores != "softmax":
            reasons.append(f"router_scores={self.router_scores!r}")
        if self.router_bias_balancing:
            reasons.append("router_bias_balancing=True")
        if self.global_every is not None:
            reasons.append(f"global_every={self.global_every}")
        return reasons

    def parameters_by_part(self) -> dict[str, int]:
        """Number of parameters per part of the whole model."""
        D, C, L = self.hidden_size, self.head_size, self.num_layers
        attention = (self.num_heads + 2 * self.num_kv_heads) * C * D + self.num_heads * C * D
        return {
            "embedding": self.vocab_size * D,
            "attention": L * (attention + (2 * C if self.qk_norm else 0)),
            "router": L * self.num_experts * D,
            "experts": L * self.num_experts * 3 * self.expert_size * D,
            "shared_experts": L * self.num_shared_experts * 3 * self.expert_size * D,
            "norms": L * 2 * D + D,
            "head": 0 if self.tie_embeddings else self.vocab_size * D,
        }

    def num_parameters(self) -> int:
        """Parameters in all (buffers not counted)."""
        return sum(self.parameters_by_part().values())

    def num_active_parameters(self) -> int:
        """Parameters one token passes through: K of the E experts."""
        parts = self.parameters_by_part()
        return sum(parts.values()) - parts["experts"] + parts["experts"] * self.top_k // self.num_experts

    def flops_by_part(self, context: int) -> dict[str, float]:
        """Model FLOPs per token of one training step (forward and backward, nothing recomputed) by part.

        A multiply-add is 2 FLOPs and the backward pass costs twice the forward pass, as in the usual definition of
        MFU; causal attention counts only the keys a query may see, averaged over a sequence of `context` tokens.
        """
        D, C, L = self.hidden_size, self.head_size, self.num_layers
        parts = self.parameters_by_part()
        keys = sum(mean_visible_keys(context, self.layer_window(layer)) for layer in range(L))
        projections = L * (2 * self.num_heads + 2 * self.num_kv_heads) * C * D
        return {
            "experts": 18.0 * L * self.top_k * self.expert_size * D,
            "shared_experts": 6.0 * parts["shared_experts"],
            "projections": 6.0 * projections,
            "attention": 3 * 4.0 * self.num_heads * C * keys,
            "router": 6.0 * parts["router"],
            "head": 6.0 * self.vocab_size * D,
        }

    def flops_per_token(self, context: int) -> float:
        """Model FLOPs per token of one training step at a context of so many tokens; see `flops_by_part`."""
        return sum(self.flops_by_part(context).values())


def mean_visible_keys(context: int, window: int | None) -> float:
    """Keys a causal query sees (itself included), averaged over the positions of a sequence."""
    if window is None or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context


PRESETS: dict[str, dict[str, Any]] = {
    # Genos-1.2B: hidden 1024, 12 layers, 16 heads of 64, 8 experts of 4096, top-2, RoPE base 5e7
    "genos-1.2b": {
        "vocab_size": 128, "hidden_size": 1024, "num_layers": 12, "num_heads": 16, "num_kv_heads": 8,
        "head_size": 64, "expert_size": 4096, "num_experts": 8, "top_k": 2, "rope_theta": 5e7,
        "max_context": 1048576,
    },
    # Mixtral-8x7B-v0.1
    "mixtral-8x7b": {
        "vocab_size": 32000, "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8,
        "head_size": 128, "expert_size": 14336, "num_experts": 8, "top_k": 2, "rope_theta": 1e6,
        "max_context": 32768,
    },
    # many small experts, as in OLMoE and DeepSeek: 64 of 1024, top-8
    "fine-64x8": {
        "vocab_size": 16, "hidden_size": 1024, "num_layers": 12, "num_heads": 16, "num_kv_heads": 4,
        "head_size": 64, "expert_size": 1024, "num_experts": 64, "top_k": 8, "rope_theta": 1e6,
        "max_context": 131072,
    },
    # trains on two CPU cores in minutes
    "tiny": {
        "vocab_size": 16, "hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
        "head_size": 32, "expert_size": 256, "num_experts": 8, "top_k": 2, "rope_theta": 1e4,
        "max_context": 1048576,
    },
}  # fmt: skip
"""Architectures by name; see `ModelConfig.preset`."""
