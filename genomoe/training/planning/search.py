"""What to change: the longest context that fits, the fastest setting that does, and a refusal that names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from genomoe.model.config import ModelConfig
from genomoe.training.activation import POLICIES
from genomoe.training.options import ConfigError
from genomoe.training.planning.device import GIB, Device
from genomoe.training.planning.memory import memory_at_peak
from genomoe.training.planning.shape import StepShape
from genomoe.training.planning.time import step_seconds


def longest_context(model: ModelConfig, shape: StepShape, memory_bytes: float, *, multiple: int = 256) -> int:
    """Tokens of the longest window, a multiple of `multiple`, whose step is predicted to fit (0 if none does).

    The window may exceed `model.max_context`: the answer is about memory.
    """

    def fits(units: int) -> bool:
        longer = dataclasses.replace(shape, context=units * multiple)
        return sum(memory_at_peak(model, longer)[0].values()) <= memory_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * multiple


def longest_context_by_policy(model: ModelConfig, shape: StepShape, memory_bytes: float) -> list[dict[str, str | int]]:
    """For every policy, and for `none` every way the experts save, the longest window that fits."""
    rows: list[dict[str, str | int]] = []
    for policy in POLICIES:
        ways = ("bf16", "mxfp8", "recompute") if policy == "none" else ("recompute",)
        for save in ways:
            if save == "mxfp8" and not shape.is_fused:
                continue
            kernels = dataclasses.replace(shape.kernels, save=save, chunk_tokens=32768, activation=policy)  # type: ignore[arg-type]
            one = dataclasses.replace(shape, batch=1, kernels=kernels, policy=policy)
            rows.append({"policy": policy, "save": save, "tokens": longest_context(model, one, memory_bytes)})
    return rows


def alternatives(model: ModelConfig, shape: StepShape, device: Device) -> Iterator[StepShape]:
    """The same step under every policy and way of saving, the fastest (by prediction) first."""
    shapes = []
    for policy in POLICIES:
        for save in ("bf16", "mxfp8", "recompute"):
            for chunk in (None, 32768):
                if save == "mxfp8" and not shape.is_fused:
                    continue
                kernels = dataclasses.replace(shape.kernels, save=save, chunk_tokens=chunk, activation=policy)
                shapes.append(dataclasses.replace(shape, kernels=kernels, policy=policy))
    return iter(sorted(shapes, key=lambda one: sum(step_seconds(model, one, device).values())))


def cheapest_that_fits(model: ModelConfig, shape: StepShape, device: Device) -> StepShape | None:
    """The fastest alternative whose predicted peak fits the device, or None."""
    for one in alternatives(model, shape, device):
        if sum(memory_at_peak(model, one)[0].values()) <= device.usable_bytes:
            return one
    return None


def overrides_of(shape: StepShape) -> str:
    """The command-line overrides that choose a shape's policy."""
    chunk = "null" if shape.kernels.chunk_tokens is None else shape.kernels.chunk_tokens
    return f"activation.policy={shape.policy} activation.save={shape.kernels.save} activation.chunk_tokens={chunk}"


def require_fit(model: ModelConfig, shape: StepShape, device: Device) -> None:
    """Refuse a step that is predicted not to fit, before anything is allocated.

    Raises:
        ConfigError: naming the predicted peak, what there is, and the cheapest policy that would fit.
    """
    peak = sum(memory_at_peak(model, shape)[0].values())
    if peak <= device.usable_bytes:
        return
    better = cheapest_that_fits(model, shape, device)
    if better is not None:
        advice = f"the fastest setting predicted to fit is {overrides_of(better)}"
    else:
        advice = (
            "no activation policy makes it fit: shorten data.context_length, lower data.batch_size or divide the "
            "model over (more) devices with parallel=fsdp"
        )
    raise ConfigError(
        f"a step of {shape.batch} x {shape.context} tokens is predicted to need {peak / GIB:.1f} GiB of the "
        f"{device.usable_bytes / GIB:.1f} GiB usable on {device.name}: {advice}."
    )
