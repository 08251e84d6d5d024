"""Rotary position embedding (RoFormer, arXiv:2104.09864) in float32, with context-extension rules.

Axis legend: T tokens, S positions, H heads, C head size, P = C/2 rotated pairs.

A float32 product `position * frequency` is off by up to 0.06 rad near position 2^20, so angles are formed in float64
and only their cosine and sine are kept, in float32. Pairs are (c, c + C/2), as in the Hugging Face models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.pointwise import use_triton


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE is stretched from the context a model was trained at to a longer one."""

    kind: Literal["linear", "ntk", "yarn"]
    """linear: positions / factor (arXiv:2306.15595). ntk: base * factor^(C/(C-2)). yarn: arXiv:2309.00071."""
    factor: float
    """New context / original context."""
    original_max_context: int
    """Context, in tokens, of the original training."""
    beta_fast: float = 32.0
    """yarn: pairs turning more often than this in the original context keep their frequency."""
    beta_slow: float = 1.0
    """yarn: pairs turning less often than this are interpolated by the factor."""
    attention_factor: float | None = None
    """yarn: scale of cosine and sine; None: 0.1 ln(factor) + 1, as in the paper."""

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "ntk", "yarn"):
            raise ValueError(f"rope_scaling.kind must be linear, ntk or yarn, got {self.kind!r}")
        if not (isinstance(self.factor, (int, float)) and math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"rope_scaling.factor must be at least 1, got {self.factor!r}")
        if not (isinstance(self.original_max_context, int) and self.original_max_context >= 1):
            raise ValueError(f"rope_scaling.original_max_context must be at least 1, got {self.original_max_context!r}")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                f"rope_scaling wants beta_fast > beta_slow > 0, got {self.beta_fast!r} and {self.beta_slow!r}"
            )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RopeScaling:
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"there is no field rope_scaling.{unknown[0]}; fields: {', '.join(sorted(known))}")
        for name in ("kind", "factor", "original_max_context"):
            if name not in fields:
                raise ValueError(f"rope_scaling lacks the field {name}")
        return cls(**fields)

    @property
    def longest_context(self) -> int:
        """Tokens the scaling covers."""
        return int(self.factor * self.original_max_context)


class RopeTable(NamedTuple):
    """Cosine and sine of every position and pair, float32."""

    cos_SP: Tensor
    sin_SP: Tensor


def rope_frequencies(head_size: int, theta: float, scaling: RopeScaling | None) -> tuple[Float[Tensor, " P"], float]:
    """Angular frequency of each pair (float64, radians per position) and the scale of cosine and sine."""
    pair_P = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    if scaling is None:
        return theta**-pair_P, 1.0
    if scaling.kind == "linear":
        return theta**-pair_P / scaling.factor, 1.0
    if scaling.kind == "ntk":
        return ntk_theta(head_size, theta, scaling.factor) ** -pair_P, 1.0

    def pair_of(rotations: float) -> float:
        turns = scaling.original_max_context / (rotations * 2 * math.pi)
        return head_size * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), head_size - 1)
    ramp_P = ((torch.arange(head_size // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    frequencies_P = theta**-pair_P * (ramp_P / scaling.factor + (1 - ramp_P))
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(scaling.factor) + 1.0
    return frequencies_P, attention_factor


def ntk_theta(head_size: int, theta: float, factor: float) -> float:
    """The base that stretches the slowest pair by `factor` and leaves the fastest alone ("NTK-aware" scaling)."""
    return theta * factor ** (head_size / max(head_size - 2, 1))


def rope_table(
    length: int,
    head_size: int,
    theta: float,
    scaling: RopeScaling | None = None,
    *,
    device: torch.device | str = "cpu",
) -> RopeTable:
    """Cosine and sine for positions 0 .. length-1, float32 [length, head_size/2] each.

    Formed in float64 in chunks of 2^18 positions, so that the float64 transient stays small at 2^22 positions.
    """
    frequencies_P, scale = rope_frequencies(head_size, theta, scaling)
    # Apple's GPUs have no float64
    where = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
    frequencies_P = frequencies_P.to(where)
    cos_SP = torch.empty(length, head_size // 2, dtype=torch.float32, device=where)
    sin_SP = torch.empty_like(cos_SP)
    for start in range(0, length, 1 << 18):
        stop = min(start + (1 << 18), length)
        position_S = torch.arange(start, stop, dtype=torch.float64, device=where)
        angle_SP = torch.outer(position_S, frequencies_P)
        cos_SP[start:stop] = angle_SP.cos() * scale
        sin_SP[start:stop] = angle_SP.sin() * scale
    return RopeTable(cos_SP.to(device), sin_SP.to(device))


def rotate(
    x_THC: Float[Tensor, "T H C"], cos_TP: Float[Tensor, "T P"], sin_TP: Float[Tensor, "T P"]
) -> Float[Tensor, "T H C"]:
    """Rotate the pairs (c, c + C/2) of every head by its token's angle; float32 inside, the input's dtype outside.

    As a complex product, which is bit for bit the same four products and takes a third of their time on a CPU.
    """
    turned_THP = torch.complex(*x_THC.float().chunk(2, dim=-1)) * torch.complex(cos_TP, sin_TP)[:, None]
    return torch.cat([turned_THP.real, turned_THP.imag], dim=-1).to(x_THC.dtype)


def apply_rope(
    q_THC: Float[Tensor, "T H C"],
    k_TGC: Float[Tensor, "T G C"],
    table: RopeTable,
    position_T: Int[Tensor, " T"],
) -> tuple[Float[Tensor, "T H C"], Float[Tensor, "T G C"]]:
    """Queries and keys rotated to their positions (plain PyTorch; `genomoe.ops.rope_triton` is the fused twin)."""
    cos_TP, sin_TP = table.cos_SP[position_T], table.sin_SP[position_T]
    return rotate(q_THC, cos_TP, sin_TP), rotate(k_TGC, cos_TP, sin_TP)


def split_qkv(
    qkv_TQ: Float[Tensor, "T Q"], num_heads: int, num_kv_heads: int
) -> tuple[Float[Tensor, "T H C"], Float[Tensor, "T G C"], Float[Tensor, "T G C"]]:
    """Views of the joint projection's columns: H query heads, then G key heads, then G value heads."""
    C = qkv_TQ.shape[1] // (num_heads + 2 * num_kv_heads)
    heads_THC = qkv_TQ.view(qkv_TQ.shape[0], -1, C)
    return tuple(heads_THC.split([num_heads, num_kv_heads, num_kv_heads], dim=1))


def apply_rope_qkv(
    qkv_TQ: Float[Tensor, "T Q"],
    table: RopeTable,
    num_heads: int,
    num_kv_heads: int,
    position_T: Int[Tensor, " T"] | None,
    seqlen: int,
    *,
    backend: str = "auto",
) -> tuple[Float[Tensor, "T H C"], Float[Tensor, "T G C"], Float[Tensor, "T G C"]]:
    """Queries and keys rotated to their positions, and the values; the fused kernel overwrites `qkv_TQ`.

    Args:
        qkv_TQ: the joint projection, Q = (H + 2G) C.
        table: at least as long as the largest position.
        position_T: position of every token; None: token index modulo `seqlen`.
        seqlen: length of the fixed windows.
    """
    if use_triton(qkv_TQ, backend) and qkv_TQ.is_contiguous():
        from genomoe.ops.rope_triton import RopeQKV

        return RopeQKV.apply(qkv_TQ, *table, position_T, num_heads, num_kv_heads, seqlen)
    q_THC, k_TGC, v_TGC = split_qkv(qkv_TQ, num_heads, num_kv_heads)
    if position_T is None:
        position_T = torch.arange(qkv_TQ.shape[0], device=qkv_TQ.device) % seqlen
    q_THC, k_TGC = apply_rope(q_THC, k_TGC, table, position_T)
    return q_THC, k_TGC, v_TGC
