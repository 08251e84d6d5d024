"""Causal prefixes computed once: keys and values of the start of a window, and suffixes that attend to them.

A causal model gives a base the same keys and values whatever follows it. So the start of a reference window, run once,
serves every sequence that begins as it does: REF and its ALT haplotypes need only the tokens from their first
difference on. `PrefixCache` and `SuffixAttention` are given to `GenoMoEModel.forward` as `attend`, which calls them
once per layer instead of the usual attention.

Axis legend: B windows, P prefix length, T tokens of all suffixes, D hidden size, G key/value heads, H query heads,
C head size; of one block of suffixes W windows, N suffixes a window, L tokens a suffix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.model.transformer import GenoMoEModel, run_layer
from genomoe.ops.attention import attention
from genomoe.ops.prefix_attention import attend_part, prefix_attention, windowed_attention

__all__ = ["PrefixCache", "SuffixAttention", "SuffixBlock", "run_prefix"]


@dataclass(kw_only=True)
class PrefixCache:
    """Usual causal attention over fixed windows [B, P] that keeps the keys and values of every layer."""

    backend: str = "auto"
    last_layer: int
    """Number of the layer of which nothing but keys, values and the last token's output is wanted."""
    keys: list[Tensor] = field(default_factory=list)
    """One [B, P, G, C] for each layer, rotated; the model's device and dtype."""
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, q_BPHC: Tensor, k_BPGC: Tensor, v_BPGC: Tensor, window: int | None) -> Tensor:
        assert layer == len(self.keys), "layers run in order, once for each cache"
        self.keys.append(k_BPGC)
        self.values.append(v_BPGC)
        if layer == self.last_layer:
            seen = slice(None) if window is None else slice(-window, None)
            return attend_part(q_BPHC[:, -1:], k_BPGC[:, seen], v_BPGC[:, seen], causal=False).out_BSHC
        return attention(q_BPHC, k_BPGC, v_BPGC, window=window, backend=self.backend)

    def run_layer(self, index, layer, x_TD, layout, valid_T, kernels):
        """As usual, but in the last layer only the last token of a window goes further than its keys and values."""
        if index != self.last_layer:
            return run_layer(index, layer, x_TD, layout, valid_T, kernels)
        _, normed_TD = layer.attention_norm(x_TD, None, kernels)
        delta_BD = layer.attention(normed_TD, layout, kernels)
        last_BD = x_TD.unflatten(0, (layout.batch, -1))[:, -1]
        stream_BD, normed_BD = layer.moe_norm(last_BD.contiguous(), delta_BD, kernels)
        stream_BD, routing = layer.moe(normed_BD, stream_BD, None, kernels)
        last_BD.copy_(stream_BD)
        return x_TD, routing


def run_prefix(model: GenoMoEModel, tokens_BP: Int[Tensor, "B P"]) -> tuple[PrefixCache, Float[Tensor, "B D"]]:
    """The keys and values of windows, each of which starts at position 0, and the hidden state of their last token."""
    cache = PrefixCache(backend=model.kernels.attention, last_layer=model.config.num_layers - 1)
    usual, model.run_layer = model.run_layer, cache.run_layer
    try:
        hidden_BPD = model(tokens_BP, compute_logits=False, attend=cache).hidden
    finally:
        model.run_layer = usual
    return cache, hidden_BPD[:, -1]


@dataclass(frozen=True, kw_only=True)
class SuffixBlock:
    """`count` suffixes for each of some windows of a cache, all of `length` tokens after `start` tokens of prefix."""

    windows: Sequence[int]
    start: int
    count: int
    length: int

    @property
    def tokens(self) -> int:
        return len(self.windows) * self.count * self.length

    def positions(self, device: torch.device) -> Int[Tensor, " T"]:
        """Position of every token in its sequence."""
        position_L = torch.arange(self.start, self.start + self.length, device=device)
        return position_L.repeat(len(self.windows) * self.count)


class SuffixAttention:
    """Attention of suffixes over their cached prefixes and, causal, over themselves.

    Args:
        blocks: what the T tokens are, one block after another; windows outermost, then suffixes.
    """

    def __init__(self, cache: PrefixCache, blocks: Sequence[SuffixBlock]):
        self.cache, self.blocks = cache, blocks

    def __call__(
        self,
        layer: int,
        q_THC: Float[Tensor, "T H C"],
        k_TGC: Float[Tensor, "T G C"],
        v_TGC: Float[Tensor, "T G C"],
        window: int | None,
    ) -> Float[Tensor, "T H C"]:
        tokens = [block.tokens for block in self.blocks]
        parts = zip(self.blocks, q_THC.split(tokens), k_TGC.split(tokens), v_TGC.split(tokens), strict=True)
        done = [self._block(layer, block, q, k, v, window) for block, q, k, v in parts]
        return done[0] if len(done) == 1 else torch.cat(done)

    def _block(self, layer: int, block: SuffixBlock, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        own = [x.unflatten(0, (len(block.windows), block.count, block.length)) for x in (q, k, v)]
        options: dict[str, Any] = {}
        attend: Callable[..., Tensor] = prefix_attention
        if window is not None and window < block.start + block.length:
            attend, options = windowed_attention, {"window": window, "stretch": 64 if q.device.type == "cpu" else 1024}
        if block.start:
            prefix = [_rows(x[layer], block.windows)[:, : block.start] for x in (self.cache.keys, self.cache.values)]
        else:
            prefix = [x[:, 0, :0] for x in own[1:]]
        return attend(*own, *prefix, **options).flatten(0, 2)


def _rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """x[rows]: a view where they are neighbours."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return x[rows[0] : rows[0] + len(rows)]
    return x[torch.tensor(rows).to(x.device, non_blocking=True)]  # a list would wait for all that runs
