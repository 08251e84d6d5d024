"""What of a backbone is trained: everything, low-rank adapters (LoRA, experts included), or nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from genomoe.model.transformer import GenoMoEModel
from genomoe.training.options import ConfigError

MODES = ("full", "lora", "head", "probe")

__all__ = ["MODES", "merge_adapters", "prepare_backbone"]


def prepare_backbone(model: GenoMoEModel, mode: str, *, rank: int, alpha: float, dropout: float) -> nn.Module:
    """The backbone with its trainable part marked; for "lora" wrapped by peft.

    LoRA adapts the projections of attention and both products of every expert (as parameters, [E, rows,
    columns], each expert with a pair of its own). Routers, norms and the embedding stay as they were
    pretrained.
    """
    if mode not in MODES:
        raise ConfigError(f"mode={mode} is not allowed: it must be one of {', '.join(MODES)}.")
    if mode == "full":
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model.lm_head.weight.requires_grad_(model.config.tie_embeddings)  # else no loss reaches it
        return model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if mode != "lora":
        return model
    try:
        from peft import LoraConfig, LoraModel
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("mode=lora needs peft: install 'genomoe[lora]'") from error
    if dropout:
        raise ConfigError(f"lora.dropout={dropout}: peft adapts expert parameters only without dropout; set it to 0.")
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # typed int, but only divided by r
        lora_dropout=0.0,
        target_modules=["qkv", "out"],
        target_parameters=["experts.w_up", "experts.w_down"],
    )
    return LoraModel(model, config, "default")


def merge_adapters(backbone: Any) -> GenoMoEModel:
    """A plain model with the adapters added to its weights; the model itself if there are none."""
    return backbone if isinstance(backbone, GenoMoEModel) else backbone.merge_and_unload()
