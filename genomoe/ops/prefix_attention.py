"""Causal attention of sequences that continue one prefix, whose keys and values are read where they lie.

Attention over a set of keys is known from its parts: with o_i the output over part i and z_i the logarithm of its sum
of exponentials, the output over both is o_1 + (o_2 - o_1) sigmoid(z_2 - z_1). So the queries of all sequences of a
window go over the keys of the prefix as one long sequence without a mask, and causally over the keys of their own
sequence; nothing is gathered or copied. On an H200 this runs cuDNN at 450 TFLOP/s where packed sequences of prefix and
suffix run PyTorch's flash kernel at 310.

Axis legend: B batch, S queries, K keys, W windows, N sequences of a window, L tokens of a sequence, P tokens of the
prefix, H query heads, G key/value heads, C head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from genomoe.ops.attention_flash4 import flash4_forward, flash4_pays
from genomoe.ops.attention_kernels import cudnn_can_run
from genomoe.ops.pointwise import use_triton

CUDNN_QUERIES = 1 << 15
"""cuDNN makes a plan for every new shape, so launches of fewer queries than this are left to the flash kernel."""


class Part(NamedTuple):
    """Attention over some of the keys."""

    out_BSHC: Tensor
    lse_BSH: Tensor
    """log sum exp(q k / sqrt(C)) over these keys; float32, or float64 for float64 inputs."""


def prefix_attention(
    q_WNLHC: Float[Tensor, "W N L H C"],
    k_WNLGC: Float[Tensor, "W N L G C"],
    v_WNLGC: Float[Tensor, "W N L G C"],
    prefix_k_WPGC: Float[Tensor, "W P G C"],
    prefix_v_WPGC: Float[Tensor, "W P G C"],
    *,
    backend: str = "auto",
) -> Float[Tensor, "W N L H C"]:
    """Attention of every sequence over its window's prefix and, causal, over itself; no gradients.

    Args:
        backend: how the parts are joined; see `genomoe.ops.pointwise.use_triton`.
    """
    W, N = q_WNLHC.shape[:2]
    own = attend_part(*(x.flatten(0, 1) for x in (q_WNLHC, k_WNLGC, v_WNLGC)), causal=True)
    if not prefix_k_WPGC.shape[1]:
        return own.out_BSHC.unflatten(0, (W, N))
    before = attend_part(q_WNLHC.flatten(1, 2), prefix_k_WPGC, prefix_v_WPGC, causal=False)
    own = Part(*(x.unflatten(0, (W, N)).flatten(1, 2) for x in own))
    return join_parts(own, before, backend=backend).unflatten(1, (N, -1))


def attend_part(
    q_BSHC: Float[Tensor, "B S H C"],
    k_BKGC: Float[Tensor, "B K G C"],
    v_BKGC: Float[Tensor, "B K G C"],
    *,
    causal: bool,
) -> Part:
    """Attention over the given keys by the device's fastest kernel that also returns the logarithms of its sums."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHC, k_BKGC, v_BKGC))
    B, H, S, C = q.shape
    if q.device.type == "cpu":
        out, lse = _cpu_kernel(q, k, v, causal)
    elif not q.is_cuda or q.dtype == torch.float64:
        return attend_part_reference(q_BSHC, k_BKGC, v_BKGC, causal=causal)
    elif not causal and flash4_pays(q.dtype, C):  # on short causal sequences cuDNN is the faster
        out, lse = flash4_forward(q_BSHC, k_BKGC, v_BKGC, None, S, False, None)
        out = out.transpose(1, 2)
    elif q.dtype != torch.float32 and B * S >= CUDNN_QUERIES and cudnn_can_run(q_BSHC, k_BKGC, v_BKGC, causal):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
        lse = lse.squeeze(-1)
    elif q.dtype != torch.float32 and C % 8 == 0:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    else:
        k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        lse = lse[:, :, :S]  # padded to a multiple of 32
    return Part(out.transpose(1, 2), lse.transpose(1, 2))


def _cpu_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """[B, H, S, C] and [B, H, S]. The kernel multiplies what a mask hides, so causal queries go in short stretches."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if not causal:
        return kernel(q, k, v)
    outs, sums = [], []
    for start in range(0, q.shape[2], 64):
        end = min(q.shape[2], start + 64)
        mask = torch.full((end - start, end), float("-inf"), dtype=q.dtype).triu(start + 1)
        out, lse = kernel(q[:, :, start:end], k[:, :, :end], v[:, :, :end], attn_mask=mask)
        outs.append(out.transpose(1, 2))
        sums.append(lse)
    return torch.cat(outs, dim=1).transpose(1, 2), torch.cat(sums, dim=2)


def attend_part_reference(q_BSHC: Tensor, k_BKGC: Tensor, v_BKGC: Tensor, *, causal: bool) -> Part:
    """All scores at once; the first query is aligned with the first key."""
    wide = torch.promote_types(q_BSHC.dtype, torch.float32)
    q, k, v = (x.transpose(1, 2).to(wide) for x in (q_BSHC, k_BKGC, v_BKGC))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    score_BHSK = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    if causal:
        hidden = torch.ones(score_BHSK.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        score_BHSK = score_BHSK.masked_fill(hidden, float("-inf"))
    out = (score_BHSK.softmax(-1) @ v).to(q_BSHC.dtype)
    return Part(out.transpose(1, 2), score_BHSK.logsumexp(-1).transpose(1, 2))


def join_parts(first: Part, second: Part, *, backend: str = "auto") -> Float[Tensor, "B S H C"]:
    """Attention over the keys of both; the memory of the first may be used for it."""
    weight_BSH = torch.sigmoid(second.lse_BSH - first.lse_BSH).contiguous()
    if use_triton(weight_BSH, backend):
        from genomoe.ops.prefix_attention_triton import lerp_rows_

        return lerp_rows_(first.out_BSHC.contiguous(), second.out_BSHC.contiguous(), weight_BSH)
    a, b = (part.out_BSHC.to(weight_BSH.dtype) for part in (first, second))
    return torch.lerp(a, b, weight_BSH[..., None]).to(first.out_BSHC.dtype)


def windowed_attention(
    q_WNLHC: Float[Tensor, "W N L H C"],
    k_WNLGC: Float[Tensor, "W N L G C"],
    v_WNLGC: Float[Tensor, "W N L G C"],
    prefix_k_WPGC: Float[Tensor, "W P G C"],
    prefix_v_WPGC: Float[Tensor, "W P G C"],
    *,
    window: int,
    stretch: int = 64,
) -> Float[Tensor, "W N L H C"]:
    """As `prefix_attention`, of at most `window` keys each, in bands of `stretch` queries and the keys they see."""
    W, N, L, H, C = q_WNLHC.shape
    near = min(prefix_k_WPGC.shape[1], window - 1)  # so many keys of the prefix are seen at all

    def keys(prefix: Tensor, own: Tensor) -> Tensor:
        last = prefix[:, None, prefix.shape[1] - near :].expand(-1, N, -1, -1, -1)
        return torch.cat([last, own], dim=2).flatten(0, 1).transpose(1, 2)

    q_MHLC = q_WNLHC.flatten(0, 1).transpose(1, 2)
    k_MGKC, v_MGKC = keys(prefix_k_WPGC, k_WNLGC), keys(prefix_v_WPGC, v_WNLGC)
    bands = []
    for start in range(0, L, stretch):
        end = min(L, start + stretch)
        low, high = max(0, near + start - window + 1), near + end
        distance = torch.arange(near + start, high, device=q_MHLC.device)[:, None]
        distance = distance - torch.arange(low, high, device=q_MHLC.device)
        band = F.scaled_dot_product_attention(
            q_MHLC[:, :, start:end],
            k_MGKC[:, :, low:high],
            v_MGKC[:, :, low:high],
            attn_mask=(distance >= 0) & (distance < window),
            enable_gqa=k_MGKC.shape[1] != H,
        )
        bands.append(band)
    return torch.cat(bands, dim=2).transpose(1, 2).reshape(W, N, L, H, C)
