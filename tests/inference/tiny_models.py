"""A tiny model whose weights are large enough that scores differ."""

from __future__ import annotations

import torch

from genomoe.model.config import ModelConfig
from genomoe.model.transformer import GenoMoEModel

TINY = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "expert_size": 48,
    "num_experts": 4,
    "top_k": 2,
    "max_context": 512,
    "initializer_std": 0.15,
}


def tiny_model(**changes) -> GenoMoEModel:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return GenoMoEModel(ModelConfig(**(TINY | changes))).eval()
