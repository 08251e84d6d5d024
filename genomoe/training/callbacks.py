"""Lightning callbacks: exact checkpoints and a progress line."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genomoe.training.checkpoint import checkpoint_path, list_checkpoints
from genomoe.training.options import ConfigError


class Checkpoint(lightning.Callback):
    """Saves the whole training state every `every_n_steps` updates, on SIGTERM and at the end; keeps the newest `keep`.

    An older one is deleted only after a newer one is safely under its name.
    """

    def __init__(self, folder: str | Path, *, every_n_steps: int = 100, keep: int = 2) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value < 1:
                raise ConfigError(f"callbacks.checkpoint.{name}={value} is not allowed: it must be at least 1.")
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self._saved_step = -1

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Save when the number of updates is due."""
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step == trainer.max_steps or trainer.received_sigterm
        if due and step != self._saved_step:
            self._saved_step = step
            trainer.save_checkpoint(checkpoint_path(self.folder, step))
            if trainer.is_global_zero:
                for _, path in list_checkpoints(self.folder)[: -self.keep]:
                    path.unlink()


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
        elif time.monotonic() >= self._next or trainer.global_step == trainer.max_steps:
            self._next = time.monotonic() + self.seconds
            print(
                f"step {trainer.global_step}/{trainer.max_steps}  {_figures(module.latest)}",
                file=sys.stderr,
                flush=True,
            )

    def on_train_end(self, *_: Any) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, *_: Any) -> None:
        """Close the bar."""
        self._close()

    def _close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _figures(latest: dict[str, float]) -> str:
    names = (
        ("train/bits_per_base", "train {:.3f} bits/base"),
        ("val/bits_per_base", "held-out {:.3f}"),
        ("train/tokens_per_second", "{:,.0f} tokens/s"),
    )
    return "  ".join(text.format(latest[name]) for name, text in names if name in latest)
