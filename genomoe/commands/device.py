"""The `--device` option."""

import torch

from genomoe.genome.errors import GenoMoEError


def resolve_device(name: str) -> str:
    """`auto` is a GPU if there is one; raises GenoMoEError for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = name.split(":")[0]
    if kind not in ("cpu", "cuda", "gpu"):
        raise GenoMoEError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:N.")
    if kind != "cpu" and not torch.cuda.is_available():
        raise GenoMoEError(f"device {name!r} was asked for, but torch {torch.__version__} sees no GPU here: use cpu.")
    return name.replace("gpu", "cuda")
