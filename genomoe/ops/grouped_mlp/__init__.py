"""All experts of a mixture-of-experts layer in one call: `grouped_mlp`.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.grouped_mlp.select import BACKENDS, select_backend

__all__ = ["grouped_mlp", "select_backend"]


def grouped_mlp(
    x_TD: Float[Tensor, "T D"],
    w_up_E2ID: Float[Tensor, "E I2 D"],
    w_down_EDI: Float[Tensor, "E D I"],
    expert_index_TK: Int[Tensor, "T K"],
    scores_TK: Float[Tensor, "T K"],
    *,
    residual_TD: Float[Tensor, "T D"] | None = None,
    backend: str = "auto",
    precision: Literal["bf16", "fp8", "mxfp8", "nvfp4"] = "bf16",
    save: Literal["bf16", "mxfp8", "recompute"] = "bf16",
    chunk_tokens: int | None = None,
    rerun: bool = False,
) -> Float[Tensor, "T D"]:
    """y_t = sum_k score_tk * down(silu(gate x_t) * (up x_t)), dropping no token.

    Args:
        x_TD: tokens, in the dtype of the weights.
        w_up_E2ID: gate (first I rows) and up projection of every expert, as `gate_up_proj` of transformers 5.
        w_down_EDI: down projection of every expert.
        expert_index_TK: the experts of each token (any integer dtype).
        scores_TK: their weights, float32; differentiable.
        residual_TD: added to y in the dtype of `x_TD`; by the fused backend in float32, before its one rounding.
        backend: "auto" or a name of `genomoe.ops.grouped_mlp.select`.
        precision: of the products' operands; "bf16" means the weights' own dtype; "nvfp4" is
            Transformer Engine's alone.
        save: what is kept of gate and up for the backward pass; "recompute": nothing, they are computed again.
        chunk_tokens: run so many tokens at a time, which bounds the transient memory.
        rerun: the call repeats an earlier one for the sake of its backward pass: what it returns may be undefined.

    Raises:
        ValueError: shapes that do not fit each other, or a backend that cannot run here (the message says why).
    """
    D = x_TD.shape[1]
    E, I2, w_D = w_up_E2ID.shape
    if w_D != D or w_down_EDI.shape != (E, D, I2 // 2) or expert_index_TK.shape != scores_TK.shape:
        raise ValueError(
            f"grouped_mlp got x {tuple(x_TD.shape)}, w_up {tuple(w_up_E2ID.shape)}, w_down {tuple(w_down_EDI.shape)}, "
            f"expert_index {tuple(expert_index_TK.shape)} and scores {tuple(scores_TK.shape)}; "
            "expected [T, D], [E, 2I, D], [E, D, I], [T, K] and [T, K]"
        )
    if backend == "auto":
        backend = select_backend(x_TD, w_up_E2ID, precision=precision, save=save).name
    elif backend not in BACKENDS:
        raise ValueError(f"there is no expert backend {backend!r}; backends: auto, {', '.join(BACKENDS)}")
    elif why_not := BACKENDS[backend].unsupported(x_TD, w_up_E2ID, precision=precision, save=save):
        raise ValueError(f"the expert backend {backend!r} cannot run here: {why_not}")
    return BACKENDS[backend].run(
        x_TD, w_up_E2ID, w_down_EDI, expert_index_TK, scores_TK,
        residual_TD=residual_TD, precision=precision, save=save, chunk_tokens=chunk_tokens, rerun=rerun,
    )  # fmt: skip
