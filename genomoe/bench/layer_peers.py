"""Other people's MoE layers, each as a function of the same tensors, for `genomoe bench layer`.

A peer is made once per case from the stacked weights and called with `(x, expert_index, scores)`; it raises
ImportError where its package is missing. Weights are those of transformers 5: w_up [E, 2I, D] with the gate first,
w_down [E, D, I].

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from genomoe.bench import sonicmoe

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def hugging_face(implementation: str) -> Callable[[Tensor, Tensor], tuple[Layer, list[Tensor]]]:
    """transformers' MixtralExperts: "eager" is its loop over experts, "grouped_mm" its grouped product."""

    def make(w_up: Tensor, w_down: Tensor) -> tuple[Layer, list[Tensor]]:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        E, D, I = w_down.shape
        config = MixtralConfig(hidden_size=D, intermediate_size=I, num_local_experts=E)
        config._experts_implementation = implementation
        with torch.device("meta"):
            module = MixtralExperts(config)
        module.gate_up_proj = torch.nn.Parameter(w_up.detach())
        module.down_proj = torch.nn.Parameter(w_down.detach())
        return (
            lambda x, index, scores: module(x, index, scores.to(x.dtype)),
            [module.gate_up_proj, module.down_proj],
        )

    return make


@functools.cache
def _compiled_passes() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Activation with scores, and the sum over choices."""

    @torch.compile
    def activation(h: Tensor, scores: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return (F.silu(gate.float()) * up.float() * scores[:, None]).to(h.dtype)

    @torch.compile
    def combine(y: Tensor, inverse: Tensor, T: int, K: int) -> Tensor:
        return y[inverse].view(T, K, -1).sum(1)

    return activation, combine


def torch_grouped(w_up: Tensor, w_down: Tensor) -> tuple[Layer, list[Tensor]]:
    """Two `torch.nn.functional.grouped_mm` with compiled activation and combination, as an expert would write today."""
    E = w_up.shape[0]
    w_up, w_down = (weight.detach().requires_grad_() for weight in (w_up, w_down))
    activation, combine = _compiled_passes()

    def layer(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        T, K = index.shape
        flat = index.reshape(-1)
        order = torch.sort(flat, stable=True).indices
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        offsets = torch.bincount(flat, minlength=E).cumsum(0).to(torch.int32)
        h = F.grouped_mm(x[order // K], w_up.transpose(1, 2), offs=offsets)
        a = activation(h, scores.reshape(-1)[order].float())
        return combine(F.grouped_mm(a, w_down.transpose(1, 2), offs=offsets), inverse, T, K)

    return layer, [w_up, w_down]


def liger(w_up: Tensor, w_down: Tensor) -> tuple[Layer, list[Tensor]]:
    """Liger-Kernel's fused MoE."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    w_up, w_down = (weight.detach().requires_grad_() for weight in (w_up, w_down))
    return (
        lambda x, index, scores: LigerFusedMoEFunction.apply(x, w_up, w_down, index.int(), scores.to(x.dtype)),
        [w_up, w_down],
    )


def transformer_engine(precision: str) -> Callable[[Tensor, Tensor], tuple[Layer, list[Tensor]]]:
    """Transformer Engine's `ops.Sequential`, its own parameters, "bf16" or "fp8" (current scaling)."""

    def make(w_up: Tensor, w_down: Tensor) -> tuple[Layer, list[Tensor]]:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling

        from genomoe.ops.grouped_mlp.te import GROUP_ALIGNMENT, _Module, interleave

        E = w_up.shape[0]
        module = _Module(w_up, w_down)
        with torch.no_grad():
            for parameter, weight in zip(module.up, interleave(w_up), strict=True):
                parameter.copy_(weight)
        recipe = Float8CurrentScaling() if precision == "fp8" else None

        def layer(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
            T = x.shape[0]
            chosen = torch.zeros(T, E, dtype=torch.int32, device=x.device).scatter_(1, index, 1)
            probs = torch.zeros(T, E, device=x.device).scatter(1, index, scores)
            xp, s, row_map, offsets, sizes = te.moe_permute_and_pad_with_probs(
                x, probs, chosen, chosen.sum(0), GROUP_ALIGNMENT[precision]
            )
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = module.sequential(xp, sizes, s, sizes)
            return te.moe_unpermute(y, row_map, restore_shape=x.shape, map_type="mask", pad_offsets=offsets)

        return layer, [*module.up, *module.down]

    return make


PEERS: dict[str, Callable[[Tensor, Tensor], tuple[Layer, list[Tensor]]]] = {
    "sonicmoe": sonicmoe.layer,
    "transformer-engine": transformer_engine("bf16"),
    "transformer-engine-fp8-current": transformer_engine("fp8"),
    "torch-grouped_mm-compiled": torch_grouped,
    "hf-grouped_mm": hugging_face("grouped_mm"),
    "hf-loop": hugging_face("eager"),
    "liger": liger,
}
