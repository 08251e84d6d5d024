"""The expert layer by Transformer Engine: `GroupedLinear`, `ScaledSwiGLU`, `GroupedLinear` in one `ops.Sequential`.

On Blackwell (compute capability 10.x) Transformer Engine fuses the three into one grouped MLP with native MXFP8. It
does so silently or not at all, so the first forward pass checks that it happened (`fused_operation`) and warns if
not. On Hopper the same module runs unfused, in bfloat16 or with `Float8CurrentScaling`.

Its parameters are one matrix per expert, gate and up interleaved by 32 rows. `_Module` holds them as views of (w_down)
or copies refreshed from (w_up) our stacked weights, and the gradients travel back through `_TransformerEngineMLP`.

Written against Transformer Engine 2.20; nothing is imported from it before a layer runs.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

INTERLEAVE = 32
FUSED_NAMES = ("GroupedMLP_CuTeGEMMGLU", "ForwardGroupedMLP_CuTeGEMMSwiGLU_MXFP8")  # from 2.17, and before
FUSION_SWITCH = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
SUPPORTED = {"bf16": (9, 12), "fp8": (9, 12), "mxfp8": (10, 10), "nvfp4": (10, 10)}
"""Compute capability, major version, from and to."""
GROUP_ALIGNMENT = {"bf16": 1, "fp8": 16, "mxfp8": 256, "nvfp4": 256}
"""Tokens per expert are padded to multiples of this."""


def unsupported(x_TD: Tensor, w_up_E2ID: Tensor, *, precision: str, save: str) -> str | None:
    """Why Transformer Engine cannot run this layer here, or None."""
    D, I = x_TD.shape[1], w_up_E2ID.shape[1] // 2
    if x_TD.device.type != "cuda":
        return f"te needs an NVIDIA GPU, not {x_TD.device.type}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "te needs Transformer Engine: pip install 'genomoe[te]'"
    if x_TD.dtype != torch.bfloat16 or w_up_E2ID.dtype != torch.bfloat16:
        return f"te multiplies bfloat16 tokens and weights, not {x_TD.dtype} and {w_up_E2ID.dtype}"
    if save == "mxfp8":
        return "te decides itself what it keeps for backward: save=bf16 or save=recompute"
    major = torch.cuda.get_device_capability(x_TD.device)[0]
    low, high = SUPPORTED[precision]
    if not low <= major <= high:
        return f"te with precision={precision} needs compute capability {low}.x to {high}.x, here {major}.x"
    multiple = 64 if precision in ("mxfp8", "nvfp4") else INTERLEAVE
    if D % multiple or I % multiple:
        return f"te with precision={precision} needs widths that are multiples of {multiple}, not {D} and {I}"
    return None


def grouped_mlp_te(
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E I2 D"],
    w_down_EDI: Float[Tensor, "E D I"],
    expert_index_TK: Int[Tensor, "T K"],
    scores_TK: Float[Tensor, "T K"],
    *,
    precision: str = "bf16",
) -> Float[Tensor, "T D"]:
    """See `genomoe.ops.grouped_mlp.grouped_mlp`; precision may also be "nvfp4"."""
    if x_TD.shape[0] == 0:
        return x_TD + 0 * (w_up_E2ID.sum() + w_down_EDI.sum() + scores_TK.sum()).to(x_TD.dtype)
    te = _transformer_engine()
    T, E = x_TD.shape[0], w_up_E2ID.shape[0]
    chosen_TE = torch.zeros(T, E, dtype=torch.int32, device=x_TD.device).scatter_(1, expert_index_TK.long(), 1)
    probs_TE = torch.zeros(T, E, device=x_TD.device).scatter(1, expert_index_TK.long(), scores_TK.float())
    xp, scores, row_map, pad_offsets, split_sizes = te.moe_permute_and_pad_with_probs(
        x_TD, probs_TE, chosen_TE, chosen_TE.sum(0), GROUP_ALIGNMENT[precision]
    )
    y = _TransformerEngineMLP.apply(xp, scores, w_up_E2ID, w_down_EDI, split_sizes, precision)
    return te.moe_unpermute(y, row_map, restore_shape=x_TD.shape, map_type="mask", pad_offsets=pad_offsets)


def fused_operation(sequential: Any) -> str | None:
    """Name of the fused operation that a Transformer Engine `Sequential` ran in its last forward pass, if any."""
    for group in sequential._module_groups or []:
        for operation, _ in getattr(group, "_forward_ops", []):
            if type(operation).__name__ in FUSED_NAMES:
                return type(operation).__name__
    return None


@functools.cache
def _transformer_engine() -> Any:
    """`transformer_engine.pytorch`, imported after torch and with its fused grouped MLP allowed."""
    os.environ.setdefault(FUSION_SWITCH, "1")
    import transformer_engine.pytorch

    return transformer_engine.pytorch


def _autocast(precision: str) -> Any:
    """Transformer Engine's own low-precision region. It holds the expert products only; the router is outside."""
    te = _transformer_engine()
    from transformer_engine.common import recipe

    if precision == "bf16":
        return te.autocast(enabled=False)
    made = {
        "fp8": lambda: recipe.Float8CurrentScaling(),
        "mxfp8": lambda: recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3),
        "nvfp4": lambda: recipe.NVFP4BlockScaling(),
    }[precision]()
    return te.autocast(enabled=True, recipe=made)


class _Module:
    """A Transformer Engine module whose parameters follow one pair of stacked weights."""

    def __init__(self, w_up_E2ID: Tensor, w_down_EDI: Tensor):
        _transformer_engine()
        import transformer_engine.pytorch.ops as ops

        E, D, I = w_down_EDI.shape
        options = {"bias": False, "dtype": w_up_E2ID.dtype, "device": w_up_E2ID.device}
        self.sequential = ops.Sequential(
            ops.GroupedLinear(E, D, 2 * I, **options),
            ops.ScaledSwiGLU(glu_interleave_size=INTERLEAVE),
            ops.GroupedLinear(E, I, D, **options),
        )
        self.up = [getattr(self.sequential[0], f"weight{expert}") for expert in range(E)]
        self.down = [getattr(self.sequential[2], f"weight{expert}") for expert in range(E)]
        for parameter, view in zip(self.down, w_down_EDI.detach(), strict=True):
            parameter.data = view
        self.checked: set[str] = set()

    def refresh(self, w_up_E2ID: Tensor) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.up, interleave(w_up_E2ID), strict=True):
                parameter.copy_(weight)

    def check_fusion(self, precision: str) -> None:
        if precision in self.checked:
            return
        self.checked.add(precision)
        if precision == "mxfp8" and fused_operation(self.sequential) is None:
            warnings.warn(
                "Transformer Engine ran its MXFP8 grouped MLP unfused, which is slower: check that "
                f"{FUSION_SWITCH}=1 was set before it was first imported and that nvidia-cutlass-dsl is installed.",
                stacklevel=2,
            )


def interleave(w_E2ID: Float[Tensor, "E I2 D"]) -> Float[Tensor, "E I2 D"]:
    """[gate; up] -> 32 rows of gate, 32 rows of up, and so on."""
    E, I2, D = w_E2ID.shape
    return w_E2ID.view(E, 2, I2 // (2 * INTERLEAVE), INTERLEAVE, D).transpose(1, 2).reshape(E, I2, D)


def deinterleave(w_E2ID: Float[Tensor, "E I2 D"]) -> Float[Tensor, "E I2 D"]:
    """The inverse of `interleave`."""
    E, I2, D = w_E2ID.shape
    return w_E2ID.view(E, I2 // (2 * INTERLEAVE), 2, INTERLEAVE, D).transpose(1, 2).reshape(E, I2, D)


_MODULES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""One module per stacked up-projection, for as long as that tensor lives."""


class _TransformerEngineMLP(torch.autograd.Function):
    """Runs the module under its own autograd graph and hands the gradients of its parameters to the stacked weights."""

    @staticmethod
    def forward(ctx, x, scores, w_up, w_down, split_sizes, precision):
        module = _MODULES.get(w_up)
        if module is None or module.down[0].data_ptr() != w_down.data_ptr():
            module = _MODULES[w_up] = _Module(w_up, w_down)
        module.refresh(w_up)
        with torch.enable_grad(), _autocast(precision):
            x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
            y = module.sequential(x, split_sizes, scores, split_sizes)
        module.check_fusion(precision)
        ctx.graph = (y, x, scores, module)
        return y.detach()

    @staticmethod
    def backward(ctx, dy):
        y, x, scores, module = ctx.graph
        gradients = torch.autograd.grad(y, (x, scores, *module.up, *module.down), dy.contiguous())
        dx, dscores, *weights = gradients
        experts = len(module.up)
        return dx, dscores, deinterleave(torch.stack(weights[:experts])), torch.stack(weights[experts:]), None, None
