"""Grouped-query self-attention with RoPE.

Axis legend: B batch, S sequence, T tokens, D hidden size, H query heads, G key/value heads, C head size,
Q = (H + 2G) C columns of the joint projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.linear import Projection
from genomoe.ops.attention import attention
from genomoe.ops.norm import rms_norm
from genomoe.ops.rope import RopeTable, apply_rope_qkv, split_qkv

Attend = Callable[[int, Tensor, Tensor, Tensor, int | None], Tensor]
"""`(layer, q, k, v, window)`, heads rotated and shaped as `genomoe.ops.attention.attention` takes them: what a layer
calls instead of that function, to keep keys and values or to attend to ones kept earlier."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """How the T rows of a batch form sequences; the same for every layer."""

    batch: int
    """B, or 1 if packed."""
    cu_seqlens: Tensor | None
    """int32 starts of packed sequences and T at the end; None for B fixed windows of T/B tokens."""
    max_seqlen: int
    table: RopeTable
    position_T: Tensor | None
    """Position of every row; None: row index modulo `max_seqlen` (fixed windows)."""
    attend: Attend | None = None
    """Replaces the attention function; None: causal attention within each sequence."""


class Attention(nn.Module):
    """Projections, optional QK-norm, RoPE and causal attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.config, self.index, self.window = config, index, config.layer_window(index)
        H, G, C = config.num_heads, config.num_kv_heads, config.head_size
        self.qkv = Projection(config.hidden_size, (H + 2 * G) * C, bias=False, device=device, dtype=dtype)
        self.out = Projection(H * C, config.hidden_size, bias=False, device=device, dtype=dtype)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(C, device=device, dtype=dtype))
            self.k_norm = nn.Parameter(torch.empty(C, device=device, dtype=dtype))

    def forward(
        self, x_TD: Float[Tensor, "T D"], layout: SequenceLayout, kernels: KernelOptions
    ) -> Float[Tensor, "T D"]:
        H, G, C = self.config.num_heads, self.config.num_kv_heads, self.config.head_size
        T = x_TD.shape[0]
        qkv_TQ = self.qkv(x_TD)
        if self.config.qk_norm:
            q_THC, k_TGC, v_TGC = split_qkv(qkv_TQ, H, G)
            q_THC = rms_norm(q_THC, self.q_norm, self.config.rms_norm_eps)
            k_TGC = rms_norm(k_TGC, self.k_norm, self.config.rms_norm_eps)
            qkv_TQ = torch.cat([q_THC.flatten(1), k_TGC.flatten(1), v_TGC.flatten(1)], dim=1)
        q_THC, k_TGC, v_TGC = apply_rope_qkv(
            qkv_TQ, layout.table, H, G, layout.position_T, layout.max_seqlen, backend=kernels.pointwise
        )
        if layout.cu_seqlens is None:
            shape = (layout.batch, T // layout.batch)
            q_THC, k_TGC, v_TGC = (x.unflatten(0, shape) for x in (q_THC, k_TGC, v_TGC))
        if layout.attend is not None:
            o_THC = layout.attend(self.index, q_THC, k_TGC, v_TGC, self.window)
        else:
            o_THC = attention(
                q_THC,
                k_TGC,
                v_TGC,
                cu_seqlens=layout.cu_seqlens,
                max_seqlen=layout.max_seqlen,
                window=self.window,
                backend=kernels.attention,
            )
        return self.out(o_THC.reshape(-1, H * C))  # `attend` may return fewer rows
