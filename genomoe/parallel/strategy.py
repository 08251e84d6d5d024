"""Lightning's side of sharding: a mesh of all ranks, and checkpoints in one file that any number of ranks can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.optim import Optimizer

from genomoe.model.transformer import GenoMoEModel
from genomoe.parallel.sharding import divide_like, gather, shard


class ShardedStrategy(ModelParallelStrategy):
    """Data parallel over all ranks, each of which stores its part of weights, gradients and optimizer states.

    A checkpoint is the one that an unsharded run writes: rank 0 gathers the whole state tensor by tensor in host memory
    and hands it to the trainer's CheckpointIO; on loading every rank reads the file and takes its part.

    Args:
        ranks: processes in all.
        compute: format of activations and products; see `genomoe.parallel.sharding.shard`.
    """

    def __init__(self, ranks: int, compute: torch.dtype) -> None:
        super().__init__(data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=False)
        self._compute = compute

    def shard(self, model: GenoMoEModel) -> None:
        """Divide `model`'s parameters; called by the module's `configure_model`, before there is an optimizer."""
        shard(model, self.device_mesh["data_parallel"], self._compute)

    # ---- checkpoints -------------------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the optimizers' states to `load_optimizer_state_dict`."""
        return True

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file with the trainer's CheckpointIO; the states are divided afterwards."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of the weights."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self.model, dict(checkpoint["state_dict"]), options=options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as an optimizer of whole parameters has it, on rank 0."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return gather(optimizer.state_dict(), keep=self.global_rank == 0)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of every moment."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = {
                index: {name: divide_like(value, parameters[index]) for name, value in moments.items()}
                for index, moments in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})
