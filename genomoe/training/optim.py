"""AdamW with weight-decay groups, and a warm-up then decay learning-rate schedule."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from genomoe.training.options import Options

SCHEDULES = ("cosine", "linear", "constant")
MOMENTS = ("full", "int8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Options):
    """AdamW and its schedule (config group `optim`)."""

    learning_rate: float = 3e-4
    """Peak learning rate, reached at the end of the warm-up."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms, biases, the embedding and the router are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean and of the running mean square of the gradient."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    moments: str = "full"
    """How the two running means are stored: full (the weights' format) or int8 (8 bits and a scale for 256 values)."""
    schedule: str = "cosine"
    """Shape of the decay after the warm-up: cosine, linear or constant."""
    warmup_fraction: float = 0.02
    """Part of all steps over which the rate rises linearly from 0."""
    stable_fraction: float = 0.0
    """Part of all steps, after the warm-up, held at the peak before the decay starts."""
    final_fraction: float = 0.1
    """Learning rate of the last step over the peak."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        self.require(self.learning_rate > 0, "learning_rate", "a number above 0")
        self.require_number("learning_rate")
        self.require_number("weight_decay")
        self.require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            "betas",
            "two numbers within [0, 1)",
        )
        self.require_number("eps")
        self.require_choice("moments", MOMENTS)
        self.require_choice("schedule", SCHEDULES)
        for key in ("warmup_fraction", "stable_fraction", "final_fraction"):
            self.require_number(key, maximum=1.0)
        self.require(
            self.warmup_fraction + self.stable_fraction <= 1.0,
            "stable_fraction",
            "at most 1 - warmup_fraction",
        )


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, object]]:
    """Split named parameters into a decayed group (matrices) and one that is not.

    Vectors (norms, biases) hold scales and offsets, the embedding holds one row a token that decay would
    shrink whenever the token is absent, and the router's scale sets how sharp the choice is: none is decayed.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        free = parameter.ndim < 2 or any(part in name for part in ("embed", "router"))
        (kept if free else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over `decay_groups`, in its fused form, which takes one pass over the state.

    With `moments=int8` it is torchao's AdamW8bit (block-wise quantised states, arXiv:2110.02861), one compiled kernel a
    parameter; vectors and parameters of fewer than 4096 values keep full states.

    Raises:
        ModuleNotFoundError: torchao is missing; the message says what to install.
    """
    groups = decay_groups(parameters, config.weight_decay)
    if config.moments == "int8":
        return _adamw_8bit()(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)


def require_available(config: OptimConfig) -> None:
    """Import what the optimizer is made of, so that its absence is told early and its states can be read.

    A checkpoint is read with `weights_only`, which knows the class of 8-bit states only once torchao is imported.

    Raises:
        ModuleNotFoundError: it is missing; the message says what to install.
    """
    if config.moments == "int8":
        _adamw_8bit()


def _adamw_8bit() -> Callable[..., torch.optim.Optimizer]:
    try:
        from torchao.optim import AdamW8bit
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "optim.moments=int8 needs torchao, which is not installed: pip install 'genomoe[int8]'."
        ) from None
    return AdamW8bit


def learning_rate_factor(step: int, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of the optimizer step `step` (from 0) of `total_steps`, over the peak."""
    warmup = math.ceil(config.warmup_fraction * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    stable_end = warmup + int(config.stable_fraction * total_steps)
    if config.schedule == "constant" or step < stable_end:
        return 1.0
    progress = min(1.0, (step - stable_end + 1) / max(1, total_steps - stable_end))
    shape = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.final_fraction + (1.0 - config.final_fraction) * shape


def make_schedule(
    optimizer: torch.optim.Optimizer, total_steps: int, config: OptimConfig
) -> torch.optim.lr_scheduler.LambdaLR:
    """`learning_rate_factor` as a scheduler to be stepped after every optimizer step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, total_steps, config))
