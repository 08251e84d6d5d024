"""Run several pretrainings one after another in this process; torchrun starts one such process for each rank.

`python train_jobs.py JOBS`: JOBS is a JSON file with a list of lists of overrides.
"""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
from torch.distributed.tensor import DTensor

from genomoe.training.compose import compose_config
from genomoe.training.run import pretrain


class RequireShards(lightning.Callback):
    """Fails unless this rank stores its even share of every weight, of its gradient and of its moments."""

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        """Look when nothing is gathered; from the second update on there are moments."""
        for name, parameter in module.named_parameters():
            state = optimizer.state[parameter]
            for value in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]) if state else (parameter,):
                assert isinstance(value, DTensor), name
                assert value.to_local().numel() * trainer.world_size == parameter.numel(), name


def main() -> None:
    """Run the jobs."""
    for overrides in json.loads(Path(sys.argv[1]).read_text()):
        pretrain(compose_config("pretrain", overrides))


if __name__ == "__main__":
    main()
