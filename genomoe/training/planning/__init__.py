"""What a configuration costs before it is run, on one device: parameters, FLOPs, memory by part, time, longest context.

`device` and `shape` say what a step runs on and how large it is, `memory` and `time` predict it, `cost` puts both
together, and `search` finds what fits.
"""

from genomoe.training.planning.cost import Plan, plan
from genomoe.training.planning.device import DEVICES, GIB, Device
from genomoe.training.planning.memory import layer_saved_bytes, memory_at_peak, predict_peak
from genomoe.training.planning.search import (
    cheapest_that_fits,
    longest_context,
    longest_context_by_policy,
    overrides_of,
    require_fit,
)
from genomoe.training.planning.shape import StepShape, step_shape
from genomoe.training.planning.time import step_seconds

__all__ = [
    "DEVICES",
    "GIB",
    "Device",
    "Plan",
    "StepShape",
    "cheapest_that_fits",
    "layer_saved_bytes",
    "longest_context",
    "longest_context_by_policy",
    "memory_at_peak",
    "overrides_of",
    "plan",
    "predict_peak",
    "require_fit",
    "step_seconds",
    "step_shape",
]
