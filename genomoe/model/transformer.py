"""The decoder: embedding, L layers of attention and experts, final norm and head.

Axis legend: B batch, S sequence, T tokens (B*S, or packed), D hidden size, V vocabulary, L layers, K experts chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from genomoe.model.attention import Attend, Attention, SequenceLayout
from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.linear import Projection
from genomoe.model.moe import MoE, Routing, router_losses
from genomoe.ops.embedding import embed
from genomoe.ops.norm import add_rms_norm
from genomoe.ops.rope import RopeTable, rope_table


class ModelOutput(NamedTuple):
    """What a forward pass returns; token axes have the shape of the input tokens ([B, S] or [T])."""

    hidden: Tensor
    """After the final norm, [..., D]."""
    logits: Tensor | None
    """[..., V], in the dtype of the weights; None if not asked for."""
    routing: tuple[Routing, ...]
    """One per layer; token axes are flat ([T, K])."""
    hidden_states: tuple[Tensor, ...] | None
    """The residual stream after the embedding and after every layer (L + 1 of [..., D]); None if not asked for."""


class RMSNorm(nn.Module):
    """Holds the weight of `genomoe.ops.norm`."""

    def __init__(self, size: int, eps: float, *, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))

    def forward(self, x_TD: Tensor, delta_TD: Tensor | None, kernels: KernelOptions) -> tuple[Tensor, Tensor]:
        """The residual stream x + delta, and its norm."""
        return add_rms_norm(x_TD, delta_TD, self.weight, self.eps, backend=kernels.pointwise)


class Layer(nn.Module):
    """x + attention(norm(x)), then + experts(norm(.))."""

    def __init__(
        self, config: ModelConfig, index: int, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.attention = Attention(config, index, **place)
        self.moe_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.moe = MoE(config, **place)

    def forward(
        self,
        x_TD: Float[Tensor, "T D"],
        layout: SequenceLayout,
        valid_T: Bool[Tensor, " T"] | None,
        kernels: KernelOptions,
        expert_index_TK: Int[Tensor, "T K"] | None = None,
    ) -> tuple[Float[Tensor, "T D"], Routing]:
        x_TD, normed_TD = self.attention_norm(x_TD, None, kernels)
        x_TD, normed_TD = self.moe_norm(x_TD, self.attention(normed_TD, layout, kernels), kernels)
        return self.moe(normed_TD, x_TD, valid_T, kernels, expert_index_TK)


LayerRunner = Callable[..., tuple[Tensor, Routing]]
"""`(index, layer, x_TD, layout, valid_T, kernels)`: runs a layer and decides what is kept for its backward pass."""


def run_layer(
    index: int,
    layer: Layer,
    x_TD: Tensor,
    layout: SequenceLayout,
    valid_T: Tensor | None,
    kernels: KernelOptions,
) -> tuple[Tensor, Routing]:
    """Plain autograd: everything is kept."""
    return layer(x_TD, layout, valid_T, kernels)


class GenoMoEModel(nn.Module):
    """A causal language model over `config.vocab_size` token ids.

    Args:
        config: the architecture.
        device: where the weights are made ("meta" makes none; load them afterwards).
        dtype: of the weights; the routers' stay float32.
        kernels: how it is computed; may be replaced at any time.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kernels: KernelOptions | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.kernels = kernels or KernelOptions()
        self.run_layer: LayerRunner = run_layer
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, **place)
        self.layers = nn.ModuleList(Layer(config, index, **place) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **place)
        self.lm_head = Projection(config.hidden_size, config.vocab_size, bias=False, **place)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self._table: RopeTable | None = None
        if self.embed.weight.device.type != "meta":
            self.init_weights()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Set every parameter; the one place of initialisation.

        | parameter                          | distribution                      | why                               |
        |------------------------------------|-----------------------------------|-----------------------------------|
        | embed.weight                       | N(0, std)                         | as Mixtral                        |
        | lm_head.weight                     | N(0, std); the embedding if tied  | as Mixtral                        |
        | attention.qkv, experts.w_up,       |                                   |                                   |
        |   shared.up                        | N(0, std)                         | as Mixtral                        |
        | attention.out, experts.w_down,     |                                   | 2L residual additions leave the   |
        |   shared.down                      | N(0, std / sqrt(2L))              | stream's variance alone (GPT-2)   |
        | router.weight                      | N(0, std), float32                | as Mixtral; near-uniform routing  |
        | router.balance_bias_E              | 0                                 | no expert favoured                |
        | every norm                         | 1                                 |                                   |

        std is `config.initializer_std`. Drawn in float32 on the parameter's device, then rounded to its dtype.
        """
        std = self.config.initializer_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("norm.weight", "q_norm", "k_norm")):
                parameter.fill_(1.0)
                continue
            narrow = name.endswith(("attention.out.weight", "experts.w_down", "shared.down.weight"))
            values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            parameter.copy_(values.normal_(0.0, residual_std if narrow else std, generator=generator))
        for name, buffer in self.named_buffers():
            if name.endswith("balance_bias_E"):
                buffer.zero_()

    # ---- forward -----------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Int[Tensor, "*T"],
        *,
        cu_seqlens: Int[Tensor, " N1"] | None = None,
        max_seqlen: int | None = None,
        position_ids: Int[Tensor, "*T"] | None = None,
        valid: Bool[Tensor, "*T"] | None = None,
        compute_logits: bool = True,
        output_hidden_states: bool = False,
        attend: Attend | None = None,
    ) -> ModelOutput:
        """Predict the next token at every position.

        Under `torch.autocast` the products run in autocast's dtype; the model casts its weights itself, so that
        norms, RoPE, routing and sums stay in float32 and the router is never rounded.

        Args:
            tokens: [B, S] windows, or [T] packed with `cu_seqlens`.
            cu_seqlens: starts of the packed sequences and T at the end, int32.
            max_seqlen: longest sequence; read from `cu_seqlens` (a synchronisation) if left out.
            position_ids: position of every token in its sequence; from the layout if left out.
            valid: False for padding, which is left out of the router statistics.
            compute_logits: False skips the head, for losses that chunk it.
            output_hidden_states: also return the residual stream after every layer.
            attend: called instead of the attention function, layer by layer; how scoring and generation keep the
                keys and values of a prefix (`genomoe.inference.prefix`). `max_seqlen` then bounds the positions.

        Raises:
            ValueError: shapes that do not fit, a sequence longer than `config.max_context`, or an activation policy
                named in `kernels` that nobody put in force.
        """
        layout = self._layout(tokens, cu_seqlens, max_seqlen, position_ids, attend)
        if self.kernels.activation != "none" and self.run_layer is run_layer and self.training:
            raise ValueError(
                f"kernels.activation={self.kernels.activation!r} is set but not in force: "
                "call genomoe.training.activation.apply_policy(model, name) after building the model"
            )
        valid_T = None if valid is None else valid.reshape(-1)
        device = tokens.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.embed.weight.dtype
        with torch.autocast(device, enabled=False):
            x_TD = embed(tokens.reshape(-1), self.embed.weight).to(dtype)
            states = [x_TD] if output_hidden_states else []
            routing = []
            for index, layer in enumerate(self.layers):
                x_TD, layer_routing = self.run_layer(index, layer, x_TD, layout, valid_T, self.kernels)
                routing.append(layer_routing)
                if output_hidden_states:
                    states.append(x_TD)
            _, hidden_TD = self.norm(x_TD, None, self.kernels)
            logits_TV = self.lm_head(hidden_TD) if compute_logits else None
        shape = tokens.shape
        return ModelOutput(
            hidden_TD.view(*shape, -1),
            None if logits_TV is None else logits_TV.view(*shape, -1),
            tuple(routing),
            tuple(state.view(*shape, -1) for state in states) if output_hidden_states else None,
        )

    def router_losses(
        self, routing: tuple[Routing, ...], *, reduce: Callable[[Tensor], Any] | None = None
    ) -> dict[str, Tensor]:
        """Unweighted balance and z losses of one forward pass; see `genomoe.model.moe.router_losses`."""
        return router_losses(routing, reduce=reduce)

    def update_balance_bias(self, counts_LE: Float[Tensor, "L E"]) -> None:
        """Loss-free balancing after an optimizer step, from each layer's summed `routing[...].stats.counts_E`."""
        for layer, counts_E in zip(self.layers, counts_LE, strict=True):
            assert isinstance(layer, Layer)
            layer.moe.router.update_balance_bias(counts_E)

    def rope(self, length: int) -> RopeTable:
        """Cosine and sine for at least `length` positions, kept until a longer table or another device is needed."""
        device = self.embed.weight.device
        table = self._table
        if table is None or table.cos_SP.shape[0] < length or table.cos_SP.device != device:
            config = self.config
            table = rope_table(length, config.head_size, config.rope_theta, config.rope_scaling, device=device)
            self._table = table
        return table

    def _layout(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        position_ids: Tensor | None,
        attend: Attend | None,
    ) -> SequenceLayout:
        if tokens.dim() != (2 if cu_seqlens is None else 1):
            raise ValueError(
                f"the model got tokens of shape {tuple(tokens.shape)}: give [B, S], or [T] with cu_seqlens"
            )
        position_T = None if position_ids is None else position_ids.reshape(-1)
        if cu_seqlens is None:
            batch, longest = tokens.shape
        else:
            batch, longest = 1, int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
            if position_T is None:
                row_T = torch.arange(tokens.shape[0], device=tokens.device)
                start_T = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=tokens.shape[0])
                position_T = row_T - start_T
        if longest > self.config.max_context:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than model.max_context={self.config.max_context}: shorten "
                "it, or raise max_context (beyond the pretraining context with model.rope_scaling)"
            )
        return SequenceLayout(
            batch=batch,
            cu_seqlens=cu_seqlens,
            max_seqlen=longest,
            table=self.rope(longest),
            position_T=position_T,
            attend=attend,
        )
