"""Checkpoints that are whole or absent: written aside, synced, then renamed; read with weights_only."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from genomoe.genome.errors import GenoMoEError

FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d+)\.ckpt")


class CheckpointError(GenoMoEError):
    """A checkpoint that cannot be written or read."""


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of optimizer step `step` lies."""
    return folder / f"step-{step:08d}.ckpt"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint in `folder`, oldest first."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.ckpt")]
    return sorted((int(match[1]), path) for match, path in found if match)


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's way to files, so that no kill or full disk leaves half a checkpoint under its final name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` beside `path`, flush it to the disk and rename it; on failure `path` is untouched."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        try:
            with temporary.open("wb") as file:
                torch.save({**checkpoint, "genomoe_format": FORMAT_VERSION}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            temporary.unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot write the checkpoint {path} ({' '.join(str(error).split())[:200]}); the earlier ones are "
                "intact: free some space, then start the same command again to go on from the last."
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read tensors and plain values only; nothing in the file can run code."""
        try:
            checkpoint = torch.load(path, map_location=map_location or "cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"cannot read the checkpoint {path}: it is damaged or was not written by genomoe; delete it to go "
                "on from the one before."
            ) from error
        if checkpoint.pop("genomoe_format", None) != FORMAT_VERSION:
            raise CheckpointError(f"the checkpoint {path} was written by another version of genomoe.")
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint file, if it is there."""
        Path(path).unlink(missing_ok=True)
