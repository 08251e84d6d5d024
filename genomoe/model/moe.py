"""The mixture-of-experts feed-forward layer: a float32 router, dropless experts, statistics for the router losses.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.linear import Projection
from genomoe.ops.grouped_mlp import grouped_mlp
from genomoe.ops.route import RoutingStats, route, router_logits


class Routing(NamedTuple):
    """What the router of one layer decided, and the sums its losses are made of (padding excluded)."""

    expert_index_TK: Tensor
    """Chosen experts, best first (int64)."""
    scores_TK: Tensor
    """Their weights, summing to 1 per token (float32, detached)."""
    stats: RoutingStats
    """Sums over the non-padding tokens; `prob_sum_E` and `z_sum` carry gradients."""


class Router(nn.Module):
    """Chooses K of E experts per token. Its parameters and arithmetic are float32 whatever the model's dtype."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, config.hidden_size, device=device, dtype=torch.float32)
        )
        self.balance_bias_E: Tensor | None
        bias_E = torch.empty(config.num_experts, device=device, dtype=torch.float32)
        self.register_buffer("balance_bias_E", bias_E if config.router_bias_balancing else None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Move to another device but never to another dtype: `model.bfloat16()` must not round the router."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        valid_T: Bool[Tensor, " T"] | None,
        kernels: KernelOptions,
        expert_index_TK: Int[Tensor, "T K"] | None = None,
    ) -> tuple[Tensor, Tensor, RoutingStats]:
        """Chosen experts [T, K], their scores [T, K] (float32) and the statistics; see `genomoe.ops.route.route`."""
        logits_TE = router_logits(x_TD, self.weight)
        return route(
            logits_TE,
            self.config.top_k,
            kind=self.config.router_scores,
            bias_E=self.balance_bias_E,
            valid_T=valid_T,
            expert_index_TK=expert_index_TK,
            backend=kernels.pointwise,
        )

    @torch.no_grad()
    def update_balance_bias(self, counts_E: Float[Tensor, " E"]) -> None:
        """Loss-free balancing: raise the bias of experts below the mean load, lower that of those above it.

        Args:
            counts_E: tokens sent to each expert since the last update, summed over all data ranks.
        """
        if self.balance_bias_E is None:
            raise ValueError("this router has no balance bias: set model.router_bias_balancing=true")
        counts_E = counts_E.to(self.balance_bias_E)
        self.balance_bias_E += self.config.router_bias_rate * torch.sign(counts_E.mean() - counts_E)


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked; `genomoe.ops.grouped_mlp` multiplies them."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        E, D, I = config.num_experts, config.hidden_size, config.expert_size
        self.w_up = nn.Parameter(torch.empty(E, 2 * I, D, device=device, dtype=dtype))
        self.w_down = nn.Parameter(torch.empty(E, D, I, device=device, dtype=dtype))

    def forward(
        self,
        x_TD: Tensor,
        stream_TD: Tensor,
        expert_index_TK: Tensor,
        scores_TK: Tensor,
        kernels: KernelOptions,
        rerun: bool,
    ) -> Float[Tensor, "T D"]:
        return grouped_mlp(
            x_TD,
            self.w_up.to(x_TD.dtype),
            self.w_down.to(x_TD.dtype),
            expert_index_TK,
            scores_TK,
            residual_TD=stream_TD,
            backend=kernels.experts,
            precision=kernels.precision,
            save=kernels.save,
            chunk_tokens=kernels.chunk_tokens,
            rerun=rerun,
        )


class SharedExpert(nn.Module):
    """One dense SwiGLU as wide as all shared experts together; every token passes through it."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        width = config.num_shared_experts * config.expert_size
        self.up = Projection(config.hidden_size, 2 * width, bias=False, device=device, dtype=dtype)
        self.down = Projection(width, config.hidden_size, bias=False, device=device, dtype=dtype)

    def forward(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        gate_TI, up_TI = self.up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate_TI) * up_TI)


class MoE(nn.Module):
    """Router, experts and shared expert of one layer."""

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.router = Router(config, device=device)
        self.experts = Experts(config, device=device, dtype=dtype)
        self.shared = SharedExpert(config, device=device, dtype=dtype) if config.num_shared_experts else None

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        stream_TD: Float[Tensor, "T D"],
        valid_T: Bool[Tensor, " T"] | None,
        kernels: KernelOptions,
        expert_index_TK: Int[Tensor, "T K"] | None = None,
    ) -> tuple[Float[Tensor, "T D"], Routing]:
        """The residual stream with the layer's output added, and the layer's routing.

        Args:
            x_TD: the normed stream.
            stream_TD: the stream; the experts add it as they sum a token's choices, in no pass of its own.
            expert_index_TK: the choice of the first run, when the layer runs again for its backward pass: it is not
                made again, and the output may be undefined.
        """
        index_TK, scores_TK, stats = self.router(x_TD, valid_T, kernels, expert_index_TK)
        if self.shared is not None:
            stream_TD = stream_TD + self.shared(x_TD)
        stream_TD = self.experts(x_TD, stream_TD, index_TK, scores_TK, kernels, rerun=expert_index_TK is not None)
        return stream_TD, Routing(index_TK, scores_TK.detach(), stats)


def router_losses(routing: tuple[Routing, ...], *, reduce: Callable[[Tensor], Any] | None = None) -> dict[str, Tensor]:
    """Mean over the layers of the Switch balance loss (arXiv:2101.03961, eq. 4) and the z-loss (arXiv:2202.08906).

    balance = E * sum_e f_e P_e with f_e the share of the T*K choices that went to expert e and P_e the mean
    probability of e: 1 when balanced, E when every token picks one expert. z = mean over tokens of
    logsumexp(logits)^2. Both over non-padding tokens only.

    Args:
        routing: one entry per layer.
        reduce: sums a tensor over the data ranks in place (for example `torch.distributed.all_reduce`); the loads
            f_e and the number of tokens then are those of all ranks. The mean of the returned losses over ranks of
            equal weight is the global loss.
    """
    balance, z = [], []
    for layer in routing:
        stats = layer.stats
        counts_E, tokens = stats.counts_E.clone(), stats.tokens
        if reduce is not None:
            reduce(counts_E)
        load_E = counts_E / counts_E.sum().clamp(min=1)
        tokens = tokens.clamp(min=1)
        balance.append(len(counts_E) * (load_E * stats.prob_sum_E / tokens).sum())
        z.append(stats.z_sum / tokens)
    return {"balance": torch.stack(balance).mean(), "z": torch.stack(z).mean()}
