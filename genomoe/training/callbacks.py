"""Lightning callbacks: exact checkpoints and a progress line."""

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genomoe.genome.errors import GenoMoEError
from genomoe.training.checkpoint import checkpoint_path, list_checkpoints
from genomoe.training.options import ConfigError

SAME_SIGNAL = 1.0
"""Seconds in which another signal is the first once more: launchers pass on what their processes were sent, too."""


class Interrupted(GenoMoEError):
    """The run was interrupted from the keyboard and stopped after a checkpoint."""


class Checkpoint(lightning.Callback):
    """Saves the whole training state every `every_n_steps` updates and at the end; keeps the newest `keep`.

    Also on SIGTERM and Ctrl-C. The first of them, to any process of the run, lets the update under way finish; then all
    processes save together and stop: rank 0 raises SIGTERMException or Interrupted, the others SIGTERMException. A
    signal more than a second later stops its process at once. An older checkpoint is deleted only after a newer one is
    safely under its name.
    """

    def __init__(self, folder: str | Path, *, every_n_steps: int = 100, keep: int = 2) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value < 1:
                raise ConfigError(f"callbacks.checkpoint.{name}={value} is not allowed: it must be at least 1.")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self._step = 0
        self._signal = 0  # the first this process got; 0: none
        self._signal_time = 0.0
        self._agreed_signal = 0  # the one all processes stop for
        self._process = 0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Take over Ctrl-C and SIGTERM, which Lightning gives back however training ends.

        Lightning's own handler of SIGTERM would talk to the other processes from within whatever it interrupts.
        """
        self._step = trainer.global_step
        if threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, partial(self._note_signal, trainer))

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Stop if it was asked for: after the update's checkpoint, its row of metrics and its validation."""
        if self._agreed_signal == signal.SIGINT and trainer.is_global_zero:
            raise Interrupted(
                f"interrupted after step {self._step}, which was saved; start the same command again to go on."
            )
        if self._agreed_signal:
            raise SIGTERMException

    def on_train_batch_end(self, trainer: lightning.Trainer, *unused: Any) -> None:
        """Save when the number of updates is due."""
        step = trainer.global_step
        if step == self._step:  # a batch of several that make an update
            return
        self._step = step
        self._agreed_signal = self._agree(trainer)
        if step % self.every_n_steps == 0 or step == trainer.max_steps or self._agreed_signal:
            trainer.save_checkpoint(checkpoint_path(self.folder, step))
            if trainer.is_global_zero:
                for _, path in list_checkpoints(self.folder)[: -self.keep]:
                    path.unlink()

    def _agree(self, trainer: lightning.Trainer) -> int:
        """The signal that any process got, SIGTERM before SIGINT; 0: none. Called by all processes together.

        This waits for the device once an update, which costs little more than the message: Lightning waits before every
        batch, for a flag of its own that only rank 0 can raise.
        """
        if trainer.world_size == 1:
            return self._signal
        number = torch.tensor(self._signal, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return int(number)

    def _note_signal(self, trainer: lightning.Trainer, number: int, frame: Any) -> None:
        in_training = os.getpid() == self._process  # and not in a loader process that was forked from it
        if in_training and not self._signal:
            self._signal, self._signal_time = number, time.monotonic()
            if trainer.is_global_zero:
                text = "\nfinishing this update to save it; a second signal stops at once"
                print(text, file=sys.stderr, flush=True)
        elif not in_training or time.monotonic() > self._signal_time + SAME_SIGNAL:
            if in_training and trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGKILL)  # the processes Lightning started
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            os.kill(os.getpid(), number)


class ProgressLine(lightning.Callback):
    """A live bar on a terminal; elsewhere one line on stderr every `seconds`."""

    def __init__(self, *, seconds: float = 20.0) -> None:
        self.seconds = seconds
        self._progress: Progress | None = None
        self._next = 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Open the bar."""
        if not trainer.is_global_zero:
            return
        self._next = time.monotonic() + self.seconds
        console = Console(stderr=True)
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=trainer.max_steps, figures="")

    def on_train_batch_end(self, trainer: lightning.Trainer, module: Any, *_: Any) -> None:
        """Move the bar, or print a line when it is time."""
        if not trainer.is_global_zero:
            return
        if self._progress is not None:
            self._progress.update(self._task, completed=trainer.global_step, figures=_figures(module.latest))
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + self.seconds
            _print_line(trainer, module)

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        """Close the bar, or print the last line: now its figures are those of the last update."""
        if self._progress is None and trainer.is_global_zero:
            _print_line(trainer, module)
        self._close()

    def on_exception(self, *_: Any) -> None:
        """Close the bar."""
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _print_line(trainer: lightning.Trainer, module: Any) -> None:
    text = f"step {trainer.global_step}/{trainer.max_steps}  {_figures(module.latest)}"
    print(text, file=sys.stderr, flush=True)


def _figures(latest: dict[str, float]) -> str:
    names = (
        ("train/bits_per_base", "train {:.3f} bits/base"),
        ("val/bits_per_base", "held-out {:.3f}"),
        ("train/tokens_per_second", "{:,.0f} tokens/s"),
    )
    return "  ".join(text.format(latest[name]) for name, text in names if name in latest)
