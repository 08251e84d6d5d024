"""Run several pretrainings one after another in this process; torchrun starts one such process for each rank.

`python train_jobs.py JOBS`: JOBS is a JSON file with a list of lists of overrides. A job that is asked to stop says so,
and the next one begins.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.tensor import DTensor

from genomoe.parallel.group import leave_group
from genomoe.training.compose import compose_config
from genomoe.training.run import Terminated, pretrain


class RequireShards(lightning.Callback):
    """Fails unless this rank stores its even share of every weight, of its gradient and of its moments."""

    def on_before_optimizer_step(self, trainer: lightning.Trainer, module: Any, optimizer: Any) -> None:
        """Look when nothing is gathered; from the second update on there are moments."""
        for name, parameter in module.named_parameters():
            state = optimizer.state[parameter]
            for value in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]) if state else (parameter,):
                assert isinstance(value, DTensor), name
                assert value.to_local().numel() * trainer.world_size == parameter.numel(), name


class SendSignal(lightning.Callback):
    """In the second update, send `signal` from rank `rank`, and go on when it has come back to that process.

    Args:
        signal: its name.
        rank: the sender.
        to: self, parent (the launcher) or group (all processes of the run, as a terminal does).
    """

    def __init__(self, signal: str, rank: int, to: str) -> None:
        self.signal, self.rank, self.to = signal, rank, to

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Send it."""
        if (trainer.global_step, trainer.global_rank) != (1, self.rank):
            return
        number = signal.Signals[self.signal]
        arrivals, arrive = socket.socketpair()
        arrive.setblocking(False)
        signal.set_wakeup_fd(arrive.fileno())
        if self.to == "group":
            os.killpg(os.getpgrp(), number)
        else:
            os.kill(os.getpid() if self.to == "self" else os.getppid(), number)
        arrivals.recv(1)
        signal.set_wakeup_fd(-1)


def main() -> None:
    """Run the jobs."""
    for overrides in json.loads(Path(sys.argv[1]).read_text()):
        try:
            pretrain(compose_config("pretrain", overrides))
        except Terminated as error:
            print(f"genomoe: {error}", file=sys.stderr)
        except SIGTERMException:
            pass
    leave_group()


if __name__ == "__main__":
    main()
