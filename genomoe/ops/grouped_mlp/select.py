"""Which expert backend runs where, and why not the others.

A backend is a pair of functions of one signature each: `run` computes, `unsupported` says in words why it cannot.
Triton and Transformer Engine are imported when a backend that needs them is asked for, never before.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from genomoe.ops.grouped_mlp import grouped_mm
from genomoe.ops.grouped_mlp.plain import in_chunks
from genomoe.ops.grouped_mlp.reference import grouped_mlp_reference


class Backend(NamedTuple):
    """How to run it (the arguments of `grouped_mlp`), and why it cannot run for given tensors (None: it can)."""

    run: Callable[..., Tensor]
    unsupported: Callable[..., str | None]


class Choice(NamedTuple):
    """A backend's name, the reason it was taken, and why each of the others was not."""

    name: str
    reason: str
    others: dict[str, str]


def _run_reference(*tensors: Tensor, precision: str, save: str, rerun: bool, **options: Any) -> Tensor:
    experts = functools.partial(
        grouped_mlp_reference, precision=precision, save="bf16" if save == "recompute" else save
    )
    return in_chunks(experts, *tensors, recompute=save == "recompute", **options)


def _reference_unsupported(x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str) -> str | None:
    D, I2 = x_TD.shape[1], w_up_E2ID.shape[1]
    if precision == "nvfp4":
        return "precision=nvfp4 is Transformer Engine's alone (experts=te, compute capability 10.x)"
    if save == "mxfp8" and I2 % 64:
        return f"save=mxfp8 needs an expert width that is a multiple of 32, not {I2 // 2}"
    if precision == "mxfp8" and (D % 32 or I2 % 64):
        return f"precision=mxfp8 needs widths that are multiples of 32, not {D} and {I2 // 2}"
    return None


def _run_grouped_mm(*tensors: Tensor, precision: str, save: str, rerun: bool, **options: Any) -> Tensor:
    return in_chunks(grouped_mm.grouped_mlp_grouped_mm, *tensors, recompute=save == "recompute", **options)


def _run_fused(*tensors: Tensor, **options: Any) -> Tensor:
    from genomoe.ops.grouped_mlp.fused import fused

    return fused(*tensors, **options)


def _quack_unsupported(x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str) -> str | None:
    if precision not in ("bf16", "fp8"):
        return f"quack has bf16 and fp8 products, not {precision}"
    if precision == "bf16" and save == "mxfp8":
        return "quack keeps gate and up in bfloat16, not in MXFP8"
    from genomoe.ops.grouped_mlp.launch_quack import quack_missing

    return quack_missing() or _fused_unsupported(x_TD, w_up_E2ID, precision=precision, save=save, name="quack")


def _fused_unsupported(
    x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str, name: str = "fused"
) -> str | None:
    D, I = x_TD.shape[1], w_up_E2ID.shape[1] // 2
    if precision == "nvfp4":
        return f"{name} has no NVFP4 products"
    if importlib.util.find_spec("triton") is None:
        return f"{name} needs Triton, which is not installed (it comes with torch's CUDA builds)"
    if x_TD.dtype != torch.bfloat16 or w_up_E2ID.dtype != torch.bfloat16:
        return f"{name} multiplies bfloat16 tokens and weights, not {x_TD.dtype} and {w_up_E2ID.dtype}"
    if D % 32 or I % 32:
        return f"{name} needs a hidden size and an expert width that are multiples of 32, not {D} and {I}"
    if x_TD.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if x_TD.device.type != "cuda":
        return f"{name} needs an NVIDIA GPU, not {x_TD.device.type} (or TRITON_INTERPRET=1, to try it slowly)"
    capability = torch.cuda.get_device_capability(x_TD.device)
    needed = (9, 0) if precision == "fp8" else (8, 0)
    if capability < needed:
        return f"{name} with precision={precision} needs compute capability {needed[0]}.{needed[1]}, here {capability}"
    return None


def _run_te(*tensors: Tensor, precision: str, save: str, rerun: bool, **options: Any) -> Tensor:
    from genomoe.ops.grouped_mlp.te import grouped_mlp_te

    experts = functools.partial(grouped_mlp_te, precision=precision)
    return in_chunks(experts, *tensors, recompute=save == "recompute", **options)


def _te_unsupported(x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str) -> str | None:
    from genomoe.ops.grouped_mlp import te

    return te.unsupported(x_TD, w_up_E2ID, precision=precision, save=save)


BACKENDS: dict[str, Backend] = {
    "te": Backend(_run_te, _te_unsupported),
    "quack": Backend(functools.partial(_run_fused, products="quack"), _quack_unsupported),
    "fused": Backend(_run_fused, _fused_unsupported),
    "grouped_mm": Backend(_run_grouped_mm, grouped_mm.unsupported),
    "reference": Backend(_run_reference, _reference_unsupported),
}
REASONS = {
    "te": "Transformer Engine's fused grouped MLP, native MXFP8",
    "quack": "grouped products of QuACK with SwiGLU in their epilogues: the fastest here",
    "fused": "grouped products between fused passes: the fastest here, and the least memory",
    "grouped_mm": "grouped products of torch",
    "reference": "a loop over experts, which runs anywhere",
}


def select_backend(x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str) -> Choice:
    """The backend that `auto` means for these tensors: the first in `BACKENDS` that can run and is worth it.

    Raises:
        ValueError: none can; the message has every reason.
    """
    others: dict[str, str] = {}
    taken: str | None = None
    for name, backend in BACKENDS.items():
        why_not = backend.unsupported(x_TD, w_up_E2ID, precision=precision, save=save)
        why_not = why_not or _not_worth_it(name, x_TD, precision)
        if why_not is None and taken is None:
            taken = name
        else:
            others[name] = why_not or f"{taken} comes first"
    if taken is None:
        raise ValueError(
            f"no expert backend offers precision={precision} with save={save} here: " + "; ".join(others.values())
        )
    return Choice(taken, REASONS[taken], others)


def _not_worth_it(name: str, x_TD: Tensor, precision: str) -> str | None:
    """Why a backend that could run is left to those who name it."""
    if name == "te" and not (precision == "mxfp8" and torch.cuda.get_device_capability(x_TD.device)[0] == 10):
        return "te is taken by itself only where its fused MXFP8 layer runs (compute capability 10.x, precision=mxfp8)"
    if x_TD.device.type == "cpu" and name in ("quack", "fused", "grouped_mm"):
        return f"on the CPU the loop over experts is faster than {name}"
    return None
