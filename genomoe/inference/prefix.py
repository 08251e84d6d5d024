"""Causal prefixes computed once: keys and values of whole windows, and suffixes that attend to them.

A causal model gives a base the same keys and values whatever follows it. So the window of the reference, run
once, serves every sequence that starts as it does: an ALT haplotype needs only the tokens from its first
difference on. Both classes are given to `GenoMoEModel.forward` as `attend`, which calls them once per layer
instead of the usual attention.

Axis legend: B windows, S window length, M suffixes, T tokens of all suffixes, G key/value heads, H query
heads, C head size, P prefix length.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.model.transformer import LayerRunner, run_layer
from genomoe.ops.attention import attention

__all__ = ["PrefixCache", "SuffixAttention", "Suffixes", "tail_runner"]

QUERIES = 64
"""A mask does not make the CPU kernel skip what it hides, so queries go in stretches of so many."""


@dataclass(kw_only=True)
class PrefixCache:
    """Usual causal attention over fixed windows [B, S] that also keeps the keys and values of every layer.

    With `tail_runner` the last layer runs for the positions from `tail` on only: nobody reads the others' output.
    """

    backend: str = "auto"
    tail: int = 0
    """First position whose output of the last layer is wanted."""
    last_layer: int = -1
    """Number of that layer; -1: every layer runs whole."""
    keys: list[Tensor] = field(default_factory=list)
    """One [B, S, G, C] for each layer, rotated; the model's device and dtype."""
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, layer: int, q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, window: int | None) -> Tensor:
        assert layer == len(self.keys), "layers run in order, once for each cache"
        self.keys.append(k_BSGC)
        self.values.append(v_BSGC)
        if layer != self.last_layer or not self.tail:
            return attention(q_BSHC, k_BSGC, v_BSGC, window=window, backend=self.backend)
        if q_BSHC.is_cuda:  # the fused kernels want as many queries as keys
            return attention(q_BSHC, k_BSGC, v_BSGC, window=window, backend=self.backend)[:, self.tail :]
        q, k, v = q_BSHC[:, self.tail :].transpose(1, 2), k_BSGC.transpose(1, 2), v_BSGC.transpose(1, 2)
        return last_queries(q, k, v, window).transpose(1, 2)


def tail_runner(cache: PrefixCache) -> LayerRunner:
    """Runs layers as usual, the last one for the positions from `cache.tail` on only.

    Before them the hidden states that come out are those that went in, and mean nothing.
    """

    def run(index, layer, x_TD, layout, valid_T, kernels):  # type: ignore[no-untyped-def]
        if index != cache.last_layer or not cache.tail:
            return run_layer(index, layer, x_TD, layout, valid_T, kernels)
        x_TD, normed_TD = layer.attention_norm(x_TD, None, kernels)
        x_BSD = x_TD.unflatten(0, (layout.batch, -1))
        tail_TD = x_BSD[:, cache.tail :].reshape(-1, x_TD.shape[1])
        tail_TD, normed_TD = layer.moe_norm(tail_TD, layer.attention(normed_TD, layout, kernels), kernels)
        delta_TD, routing = layer.moe(normed_TD, None, kernels)
        out_BSD = x_BSD.clone()
        out_BSD[:, cache.tail :] = (tail_TD + delta_TD).unflatten(0, (layout.batch, -1))
        return out_BSD.flatten(0, 1), routing

    return run


def last_queries(
    q_MHSC: Float[Tensor, "M H S C"],
    k_MGKC: Float[Tensor, "M G K C"],
    v_MGKC: Float[Tensor, "M G K C"],
    window: int | None,
) -> Float[Tensor, "M H S C"]:
    """Causal attention of the last S of K positions, in stretches of queries that see no key beyond their own last."""
    length, total = q_MHSC.shape[2], k_MGKC.shape[2]
    gqa = q_MHSC.shape[1] != k_MGKC.shape[1]
    parts = []
    for start in range(0, length, QUERIES):
        end = min(length, start + QUERIES)
        seen = total - length + end
        row = torch.arange(total - length + start, seen, device=q_MHSC.device)[:, None]
        column = torch.arange(seen, device=q_MHSC.device)
        visible = column <= row
        if window is not None:
            visible &= row - column < window
        q, k, v = q_MHSC[:, :, start:end], k_MGKC[:, :, :seen], v_MGKC[:, :, :seen]
        parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=gqa))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@dataclass(frozen=True, kw_only=True)
class Suffixes:
    """Which prefix each of M packed suffixes continues, and for how many tokens.

    Suffix m has `lengths[m]` tokens and sees the first `prefixes[m]` tokens of window `windows[m]`.
    """

    windows: Sequence[int]
    prefixes: Sequence[int]
    lengths: Sequence[int]

    def positions(self, device: torch.device) -> Int[Tensor, " T"]:
        """Position of every token in its sequence."""
        prefix_M, length_M = self._tensors(device)
        start_M = torch.cumsum(length_M, 0) - length_M
        total = int(sum(self.lengths))
        return torch.arange(total, device=device) + torch.repeat_interleave(
            prefix_M - start_M, length_M, output_size=total
        )

    def cu_seqlens(self, device: torch.device) -> Int[Tensor, " M1"]:
        return F.pad(torch.tensor(self.lengths, device=device).cumsum(0), (1, 0)).int()

    @property
    def longest(self) -> int:
        """Longest sequence, prefix and suffix together."""
        return max(p + s for p, s in zip(self.prefixes, self.lengths, strict=True))

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.prefixes, device=device), torch.tensor(self.lengths, device=device)


class SuffixAttention:
    """Attention of packed suffixes over their cached prefixes and themselves, causal.

    On CUDA in 16 bits one flash launch a layer; elsewhere one call for each pair of prefix and suffix
    lengths.
    """

    def __init__(self, cache: PrefixCache, suffixes: Suffixes):
        self.cache, self.suffixes = cache, suffixes
        device = cache.keys[0].device
        self._B, self._S = cache.keys[0].shape[:2]
        self._plan_packed(device)

    def _plan_packed(self, device: torch.device) -> None:
        """Row numbers, in [all cached rows; all suffix rows], of every sequence's keys one after another."""
        plan = self.suffixes
        window_M = torch.tensor(plan.windows, device=device)
        prefix_M, length_M = plan._tensors(device)
        total_M = prefix_M + length_M
        start_M = torch.cumsum(total_M, 0) - total_M
        suffix_start_M = torch.cumsum(length_M, 0) - length_M + self._B * self._S
        size = int(sum(plan.prefixes) + sum(plan.lengths))
        owner = torch.repeat_interleave(torch.arange(len(total_M), device=device), total_M, output_size=size)
        within = torch.arange(size, device=device) - start_M[owner]
        in_prefix = within < prefix_M[owner]
        self._rows = torch.where(
            in_prefix, window_M[owner] * self._S + within, suffix_start_M[owner] + within - prefix_M[owner]
        )
        self._cu_q = plan.cu_seqlens(device)
        self._cu_k = F.pad(total_M.cumsum(0), (1, 0)).int()
        buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, shape in enumerate(zip(plan.prefixes, plan.lengths, strict=True)):
            buckets[shape].append(index)
        self._buckets = buckets
        self._starts_q, self._starts_k = self._cu_q.tolist(), self._cu_k.tolist()

    def __call__(
        self,
        layer: int,
        q_THC: Float[Tensor, "T H C"],
        k_TGC: Float[Tensor, "T G C"],
        v_TGC: Float[Tensor, "T G C"],
        window: int | None,
    ) -> Float[Tensor, "T H C"]:
        keys, values = (
            torch.cat([cached[layer].flatten(0, 1), new]).index_select(0, self._rows)
            for cached, new in ((self.cache.keys, k_TGC), (self.cache.values, v_TGC))
        )
        if q_THC.is_cuda and q_THC.dtype in (torch.bfloat16, torch.float16):
            return self._flash(q_THC, keys, values, window)
        out = torch.empty_like(q_THC)
        for (prefix, length), members in self._buckets.items():
            self._dense(out, q_THC, keys, values, prefix, length, members, window)
        return out

    def _flash(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """PyTorch's flash kernel; with fewer queries than keys its causal mask is aligned at the last of
        both.
        """
        left = -1 if window is None else window - 1
        longest = max(self.suffixes.lengths)
        result = torch.ops.aten._flash_attention_forward(
            q, keys, values, self._cu_q, self._cu_k, longest, self.suffixes.longest, 0.0, True, False,
            window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return result[0]

    def _dense(
        self,
        out: Tensor,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        prefix: int,
        length: int,
        members: list[int],
        window: int | None,
    ) -> None:
        def take(x: Tensor, starts: list[int], size: int) -> Tensor:
            if members[-1] - members[0] + 1 == len(members):  # neighbours: a view
                first = starts[members[0]]
                return x[first : first + len(members) * size].view(len(members), size, *x.shape[1:]).transpose(1, 2)
            return torch.stack([x[starts[m] : starts[m] + size] for m in members]).transpose(1, 2)

        q_MHSC = take(q, self._starts_q, length)
        k_MGKC, v_MGKC = (take(x, self._starts_k, prefix + length) for x in (keys, values))
        o_MSHC = last_queries(q_MHSC, k_MGKC, v_MGKC, window).transpose(1, 2)
        for index, member in enumerate(members):
            start = self._starts_q[member]
            out[start : start + length] = o_MSHC[index]
