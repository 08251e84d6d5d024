"""How a run is spread over devices (config group `parallel`)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from genomoe.training.optim import OptimConfig
from genomoe.training.options import ConfigError, Options
from genomoe.training.precision import PrecisionConfig

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

STRATEGIES = ("single", "ddp", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(Options):
    """What each device holds; every one of them reads other windows (config group `parallel`)."""

    strategy: str = "single"
    """single: one device; ddp: a whole copy on each; fsdp: weights, gradients and moments divided over them (FSDP2)."""

    def __post_init__(self) -> None:
        self.require_choice("strategy", STRATEGIES)

    def check(self, ranks: int, optim: OptimConfig) -> None:
        """Raise ConfigError if a run on so many devices with this optimizer cannot be spread so."""
        if self.strategy == "single" and ranks > 1:
            raise ConfigError(
                f"parallel=single trains on one device, but trainer.devices and trainer.num_nodes ask for {ranks}: use "
                "parallel=ddp (a copy of the model on each) or parallel=fsdp (the model divided over them)."
            )
        if self.strategy != "single" and not torch.distributed.is_available():
            raise ConfigError(
                f"parallel={self.strategy} needs torch.distributed, which this build of torch {torch.__version__} "
                "lacks: use parallel=single, or install another build."
            )
        if self.strategy == "fsdp" and optim.moments == "int8":
            raise ConfigError(
                "parallel=fsdp cannot divide optim.moments=int8: use optim.moments=full, which it divides over the "
                "devices, or parallel=ddp."
            )

    def shards(self, ranks: int) -> int:
        """Devices over which weights, gradients and moments are divided."""
        return ranks if self.strategy == "fsdp" else 1

    def lightning_strategy(self, ranks: int, precision: PrecisionConfig) -> str | Strategy:
        """What Lightning's Trainer takes as `strategy`."""
        if self.strategy == "fsdp":
            from genomoe.parallel.strategy import ShardedStrategy

            return ShardedStrategy(ranks, precision.compute_dtype)
        return "auto" if self.strategy == "single" else self.strategy
