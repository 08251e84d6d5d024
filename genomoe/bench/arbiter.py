"""Who is right where two float32 models differ: Hugging Face's Mixtral with every step in float64.

`MixtralForCausalLM` in float64 still takes norms, rotary angles and router probabilities in float32, and an angle of
position 8,192 in float32 is off by up to 5e-4. Here these three are in float64, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from genomoe.evaluation.discrimination import spearman

__all__ = ["agreement", "in_float64"]


def in_float64(model: Any) -> Any:
    """A copy of a `MixtralForCausalLM` (with the default rotary embedding) that computes in float64 throughout."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the grouped product is of bfloat16 only
    replaced: dict[str, Callable[..., Any]] = {
        "MixtralRMSNorm": _norm,
        "MixtralRotaryEmbedding": _rotary,
        "MixtralTopKRouter": _router,
    }
    found = set()
    for module in exact.modules():
        kind = type(module).__name__
        if kind in replaced:
            module.forward = partial(replaced[kind], module)
            found.add(kind)
    assert found == replaced.keys(), f"this transformers has no {', '.join(sorted(replaced.keys() - found))}"
    return exact


def agreement(scores: np.ndarray, exact: np.ndarray) -> dict[str, Any]:
    """How far scores are from those in float64, nats, and whether they rank alike."""
    difference = scores - exact
    return {
        "float64_pairs": len(exact),
        "largest_difference_from_float64": float(np.abs(difference).max()),
        "rms_difference_from_float64": float(np.sqrt(np.square(difference).mean())),
        "rank_correlation_with_float64": float(spearman(exact, scores)),
    }


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.square().mean(-1, keepdim=True)
    return module.weight * hidden_states / torch.sqrt(variance + module.variance_epsilon)


def _rotary(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    assert module.rope_type == "default"
    theta, pairs = module.config.rope_parameters["rope_theta"], len(module.inv_freq)
    frequency = theta ** -(torch.arange(pairs, dtype=torch.float64, device=x.device) / pairs)
    angle = position_ids[..., None].double() * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def _router(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden_states.reshape(-1, module.hidden_dim), module.weight)
    value, index = logits.softmax(-1).topk(module.top_k, dim=-1)
    return logits, value / value.sum(-1, keepdim=True), index
