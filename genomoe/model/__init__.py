"""Architectures and weights: what a model is and how it is saved."""

from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.moe import Routing, router_losses
from genomoe.model.transformer import GenoMoEModel, ModelOutput

__all__ = ["GenoMoEModel", "KernelOptions", "ModelConfig", "ModelOutput", "Routing", "router_losses"]
