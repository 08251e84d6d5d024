"""What is stored and multiplied in which format, and what this machine can do of it."""

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import torch

from genomoe.training.options import ConfigError, Options

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXPERT_PRODUCTS = ("bf16", "fp8", "mxfp8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Options):
    """Formats of a run (config group `precision`). Router, softmax, norms' statistics and loss are float32 always."""

    parameters: str = "float32"
    """Format of the weights, their gradients and the optimizer's state: float32 or bfloat16."""
    compute: str = "float32"
    """Format of activations and products: float32 or bfloat16 (autocast, if the parameters are float32)."""
    experts: str = "bf16"
    """Products inside the experts: bf16 (meaning the `compute` format), fp8 or mxfp8."""

    def __post_init__(self) -> None:
        self.require_choice("parameters", tuple(DTYPES))
        self.require_choice("compute", tuple(DTYPES))
        self.require(
            self.parameters == "float32" or self.compute == self.parameters,
            "compute",
            f"{self.parameters} when the parameters are {self.parameters}",
        )
        self.require_choice("experts", EXPERT_PRODUCTS)

    @property
    def dtype(self) -> torch.dtype:
        """Torch's name for `parameters`."""
        return DTYPES[self.parameters]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Torch's name for `compute`."""
        return DTYPES[self.compute]

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The region in which a forward pass runs: autocast where `compute` is lower than `parameters`."""
        if self.compute == self.parameters:
            return nullcontext()
        return torch.autocast(device.type, self.compute_dtype)

    def check(self, device: torch.device) -> None:
        """Raise ConfigError if `device` cannot run it, naming what it can."""
        if device.type != "cuda" or self.experts == "bf16":
            return
        major, minor = torch.cuda.get_device_capability(device)
        if self.experts == "fp8" and (major, minor) < (9, 0):
            raise ConfigError(
                f"precision fp8 needs a GPU of compute capability 9.0 or newer, this is a "
                f"{torch.cuda.get_device_name(device)} ({major}.{minor}): use precision=bf16 or precision=mxfp8."
            )
