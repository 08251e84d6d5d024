"""All that is predicted of a step in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from genomoe.model.config import ModelConfig
from genomoe.training.planning.device import Device
from genomoe.training.planning.memory import layer_saved_bytes, memory_at_peak
from genomoe.training.planning.shape import StepShape
from genomoe.training.planning.time import step_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted cost of one training step on one device."""

    shape: StepShape
    parameters: int
    """In all."""
    active_parameters: int
    """Of them, those one token passes through."""
    flops_per_token: Mapping[str, float]
    """Forward and backward, nothing recomputed, by part."""
    memory: Mapping[str, int]
    """Bytes at the moment of the peak, by part."""
    moment: str
    """When that is: loss, last layer or first layer."""
    saved_bytes_per_token_layer: int
    """What a layer keeps from its forward to its backward pass."""
    seconds: Mapping[str, float]
    """Predicted time of a step by part; empty without a device."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of a step."""
        return sum(self.memory.values())

    @property
    def step_seconds(self) -> float:
        """Predicted time of a step."""
        return sum(self.seconds.values())


def plan(model: ModelConfig, shape: StepShape, device: Device | None = None) -> Plan:
    """Predict the cost of a step of this shape."""
    memory, moment = memory_at_peak(model, shape)
    return Plan(
        shape=shape,
        parameters=model.num_parameters(),
        active_parameters=model.num_active_parameters(),
        flops_per_token=model.flops_by_part(shape.context),
        memory=memory,
        moment=moment,
        saved_bytes_per_token_layer=layer_saved_bytes(model, shape),
        seconds=step_seconds(model, shape, device) if device else {},
    )
