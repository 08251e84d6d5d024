"""Lightning callbacks: exact checkpoints and a progress line."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genomoe.genome.errors import GenoMoEError
from genomoe.training.checkpoint import checkpoint_path, list_checkpoints
from genomoe.training.options import ConfigError


class Interrupted(GenoMoEError):
    """The run was interrupted from the keyboard and stopped after a checkpoint."""


class Checkpoint(lightning.Callback):
    """Saves the whole training state every `every_n_steps` updates and at the end; keeps the newest `keep`.

    Also on SIGTERM and Ctrl-C. In a run of one process the first of them lets the update under way finish, saves, and
    raises SIGTERMException or Interrupted; a second stops at once. In a run of several processes Lightning's own
    handler sees to SIGTERM. An older checkpoint is deleted only after a newer one is safely under its name.
    """

    def __init__(self, folder: str | Path, *, every_n_steps: int = 100, keep: int = 2) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value < 1:
                raise ConfigError(f"callbacks.checkpoint.{name}={value} is not allowed: it must be at least 1.")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self._saved_step = -1
        self._signal: int | None = None
        self._usual_handlers: dict[int, Any] = {}
        self._process = 0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Take over Ctrl-C and SIGTERM."""
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            self._process = os.getpid()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._usual_handlers[number] = signal.signal(number, self._note_signal)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Stop if it was asked for: after the update's checkpoint, its row of metrics and its validation."""
        if self._signal is not None and trainer.global_step == self._saved_step:
            if self._signal == signal.SIGTERM:
                raise SIGTERMException
            raise Interrupted(
                f"interrupted after step {self._saved_step}, which was saved; start the same command again to go on."
            )

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when the number of updates is due."""
        step = trainer.global_step
        updated = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        stop = trainer.received_sigterm or (self._signal is not None and updated)
        due = step % self.every_n_steps == 0 or step == trainer.max_steps or stop
        if due and step != self._saved_step:
            self._saved_step = step
            trainer.save_checkpoint(checkpoint_path(self.folder, step))
            if trainer.is_global_zero:
                for _, path in list_checkpoints(self.folder)[: -self.keep]:
                    path.unlink()

    def on_train_end(self, *_: Any) -> None:
        """Give the signals back."""
        self._restore_handlers()

    def on_exception(self, *_: Any) -> None:
        """Give the signals back."""
        self._restore_handlers()

    def _note_signal(self, number: int, frame: Any) -> None:
        usual = self._usual_handlers.get(number)
        self._restore_handlers()
        if os.getpid() != self._process:  # a loader process that was forked from the training process
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else usual)
            os.kill(os.getpid(), number)
            return
        self._signal = number
        print("\nfinishing this update to save it; a second signal stops at once", file=sys.stderr, flush=True)

    def _restore_handlers(self) -> None:
        for number, handler in self._usual_handlers.items():
            signal.signal(number, handler)
        self._usual_handlers = {}


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
