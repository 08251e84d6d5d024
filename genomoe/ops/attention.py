"""Causal grouped-query attention over fixed windows or packed sequences, with an optional sliding window.

Axis legend: B batch, S sequence, T tokens (packed), H query heads, G key/value heads, C head size.

Backends, each with the same meaning:
- `reference`: scores in float32, masks written out; for tests.
- `sdpa`: fixed windows by cuDNN where it can run (1.5 times the flash kernel on an H200), all else by PyTorch's
  scaled_dot_product_attention and its own choice; packed sequences one after another, windows in bands.
- `varlen`: the flash kernel of torch with cu_seqlens and window in one launch (CUDA).
- `flash4`: FlashAttention-4, an optional package; the fastest on Hopper for all of these (`attention_flash4.py`).
- `te`: Transformer Engine's DotProductAttention (CUDA, imported on first use).

cuDNN is called by hand: which kernel scaled_dot_product_attention prefers is a setting of the whole process, which also
governs every other model in it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from genomoe.ops.attention_flash4 import FLASH4, flash4_missing, flash4_pays, head_unfit
from genomoe.ops.attention_kernels import (
    CUDNN,
    FLASH,
    AttentionCache,
    Masking,
    call_kernel,
    cudnn_can_run,
    kernel_of,
)

BACKENDS = ("auto", "reference", "sdpa", "varlen", "flash4", "te")


class Choice(NamedTuple):
    """A backend's name, the reason it was taken, and why each of the others was not."""

    name: str
    reason: str
    others: dict[str, str]


def select_attention(
    device: torch.device, dtype: torch.dtype, *, packed: bool, window: bool, head_size: int = 64
) -> Choice:
    """The backend that `auto` means; `genomoe doctor` prints it with its reasons."""
    others = {
        "flash4": flash4_missing()
        or head_unfit(head_size)
        or "measured on Hopper alone: elsewhere named only (attention=flash4)",
        "varlen": "",
        "sdpa": "",
        "te": transformer_engine_missing() or "no faster than the kernels of torch here: named only (attention=te)",
        "reference": "holds all scores in float32: for tests",
    }
    if device.type != "cuda":
        name, reason = "sdpa", f"scaled_dot_product_attention is the only fused kernel on {device.type}"
        others["varlen"] = f"torch's variable-length flash kernel needs an NVIDIA GPU, not {device.type}"
    elif dtype not in (torch.bfloat16, torch.float16):
        name, reason = "sdpa", f"the flash and cuDNN kernels take 16-bit inputs, not {dtype}"
        others["varlen"] = others["flash4"] = reason
    elif flash4_pays(dtype, head_size):
        name, reason = "flash4", "on Hopper 1.1-1.2 times cuDNN's kernel, 1.8 times the flash kernel of torch"
        others["varlen"] = others["sdpa"] = "slower than FlashAttention-4 on Hopper"
    elif packed or window:
        what = " and ".join(name for name, on in (("packed sequences", packed), ("a sliding window", window)) if on)
        name, reason = "varlen", f"one flash launch covers {what}"
        others["sdpa"] = f"cuDNN behind PyTorch does not take {what}: a call for every sequence or band of the window"
    else:
        name, reason = "sdpa", "fixed causal windows: cuDNN where it can run, 1.2-1.7 times the flash kernel on Hopper"
        others["varlen"] = "its flash kernel is slower than cuDNN where there is one length and no window"
    del others[name]
    return Choice(name, reason, others)


def attention(
    q_THC: Float[Tensor, "*T H C"],
    k_TGC: Float[Tensor, "*T G C"],
    v_TGC: Float[Tensor, "*T G C"],
    *,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    max_seqlen: int | None = None,
    causal: bool = True,
    window: int | None = None,
    backend: str = "auto",
    cache: AttentionCache | None = None,
) -> Float[Tensor, "*T H C"]:
    """softmax(q k^T / sqrt(C)) v within each sequence, in the dtype of q.

    Args:
        q_THC, k_TGC, v_TGC: [B, S, heads, C] fixed windows with `cu_seqlens` None, else [T, heads, C] packed.
        cu_seqlens: int32 starts of the packed sequences and T at the end.
        max_seqlen: longest packed sequence.
        causal: attend to the token itself and what is before it.
        window: with `causal`, attend to at most so many tokens, the token itself included.
        cache: keeps the output from the first call with these inputs to the second, which does not compute it again.

    Raises:
        ValueError: an unknown backend, shapes that do not fit, or a window without `causal`.
    """
    if backend not in BACKENDS:
        raise ValueError(f"there is no attention backend {backend!r}; backends: {', '.join(BACKENDS)}")
    if q_THC.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(
            f"attention got q {tuple(q_THC.shape)}: give [B, S, heads, C], or [T, heads, C] with cu_seqlens"
        )
    if window is not None and not causal:
        raise ValueError("a sliding window looks backwards only: it needs causal=True")
    longest = q_THC.shape[1] if cu_seqlens is None else max_seqlen
    if window is not None and longest is not None and window >= longest:
        window = None
    if backend == "auto":
        backend = select_attention(
            q_THC.device,
            q_THC.dtype,
            packed=cu_seqlens is not None,
            window=window is not None,
            head_size=q_THC.shape[-1],
        ).name
    masking = Masking(cu_seqlens=cu_seqlens, max_seqlen=longest or 0, causal=causal, window=window)
    if backend == "varlen":
        return _varlen(q_THC, k_TGC, v_TGC, masking, cache)
    if backend == "flash4":
        if why_not := flash4_missing() or head_unfit(q_THC.shape[-1]):
            raise ValueError(f"the attention backend 'flash4' cannot run: {why_not}")
        return call_kernel(q_THC, k_TGC, v_TGC, _with_longest(masking), FLASH4, cache)
    fixed = backend == "sdpa" and cu_seqlens is None and window is None
    if fixed and cudnn_can_run(q_THC, k_TGC, v_TGC, causal):
        return call_kernel(q_THC, k_TGC, v_TGC, masking, CUDNN, cache)
    function = {"te": _transformer_engine, "reference": _reference, "sdpa": _sdpa}[backend]
    if cu_seqlens is not None and backend != "te":
        function = functools.partial(_one_by_one, function)
    if cache is not None:
        kernel = kernel_of(lambda q, k, v: function(q, k, v, masking))
        return call_kernel(q_THC, k_TGC, v_TGC, masking, kernel, cache)
    return function(q_THC, k_TGC, v_TGC, masking)


def _one_by_one(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Tensor:
    """Packed sequences, one call each: fine for a few long ones."""
    assert masking.cu_seqlens is not None
    lengths = masking.cu_seqlens.diff().tolist()
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    return torch.cat([function(qs[None], ks[None], vs[None], masking)[0] for qs, ks, vs in parts if qs.shape[0]])


def _reference(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, masking: Masking) -> Tensor:
    S, H, C = q_BSHC.shape[1:]
    group = H // k_BSGC.shape[2]
    q_BHSC = q_BSHC.transpose(1, 2).float()
    k_BHSC = k_BSGC.transpose(1, 2).float().repeat_interleave(group, dim=1)
    v_BHSC = v_BSGC.transpose(1, 2).float().repeat_interleave(group, dim=1)
    score_BHSS = q_BHSC @ k_BHSC.transpose(2, 3) / C**0.5
    if masking.causal:
        distance_SS = torch.arange(S, device=q_BSHC.device)[:, None] - torch.arange(S, device=q_BSHC.device)
        visible_SS = distance_SS >= 0
        if masking.window is not None:
            visible_SS &= distance_SS < masking.window
        score_BHSS = score_BHSS.masked_fill(~visible_SS, float("-inf"))
    return (score_BHSS.softmax(-1) @ v_BHSC).transpose(1, 2).to(q_BSHC.dtype)


def _sdpa(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, masking: Masking) -> Tensor:
    if masking.window is not None and masking.window < q_BSHC.shape[1]:
        return _sdpa_banded(q_BSHC, k_BSGC, v_BSGC, masking.window)
    return _sdpa_call(q_BSHC, k_BSGC, v_BSGC, masking.causal, None)


def _sdpa_call(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BSHC, k_BSGC, v_BSGC))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=gqa)
    return out.transpose(1, 2)


def _sdpa_banded(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, window: int) -> Tensor:
    """A sliding window in blocks of `window` queries, each against its own and the previous block of keys.

    Work grows as S * 2 * window instead of S^2; all blocks but the first share one mask.
    """
    B, S, H, C = q_BSHC.shape
    first = _sdpa_call(q_BSHC[:, :window], k_BSGC[:, :window], v_BSGC[:, :window], True, None)
    blocks = -(-S // window) - 1
    pad = (blocks + 1) * window - S
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q_BSHC, k_BSGC, v_BSGC))

    def bands(x: Tensor) -> Tensor:
        blocked = x.view(B, blocks + 1, window, -1, C)
        return torch.cat([blocked[:, :-1], blocked[:, 1:]], dim=2).flatten(0, 1)

    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device) - window
    mask = (column <= row) & (column > row - window)
    rest = _sdpa_call(q[:, window:].reshape(B * blocks, window, H, C), bands(k), bands(v), False, mask)
    return torch.cat([first, rest.reshape(B, blocks * window, H, C)], dim=1)[:, :S]


def _varlen(q: Tensor, k: Tensor, v: Tensor, masking: Masking, cache: AttentionCache | None) -> Tensor:
    if masking.cu_seqlens is not None:
        return call_kernel(q, k, v, _with_longest(masking), FLASH, cache)
    B, S = q.shape[:2]
    starts = torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=q.device)
    packed = dataclasses.replace(masking, cu_seqlens=starts)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    return call_kernel(q, k, v, packed, FLASH, cache).unflatten(0, (B, S))


def _with_longest(masking: Masking) -> Masking:
    """Knowing the longest packed sequence, which is read from the device if it was not given."""
    if masking.max_seqlen or masking.cu_seqlens is None:
        return masking
    return dataclasses.replace(masking, max_seqlen=int(masking.cu_seqlens.diff().max()))


def transformer_engine_missing() -> str | None:
    """Why Transformer Engine's attention cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed (pip install 'genomoe[te]')"
    return None


@functools.lru_cache(maxsize=32)
def _te_module(heads: int, groups: int, size: int, layout: str, mask: str, window: tuple[int, int]) -> Any:
    import transformer_engine.pytorch as te

    return te.DotProductAttention(
        heads, size, num_gqa_groups=groups, attn_mask_type=mask, qkv_format=layout, window_size=window
    )


def _transformer_engine(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> Tensor:
    missing = transformer_engine_missing()
    if missing:
        raise ValueError(f"the attention backend 'te' cannot run: {missing}")
    cu_seqlens = masking.cu_seqlens
    layout = "bshd" if cu_seqlens is None else "thd"
    mask = ("causal" if cu_seqlens is None else "padding_causal") if masking.causal else "no_mask"
    left = -1 if masking.window is None else masking.window - 1
    window = (left, 0 if masking.causal else -1)
    module = _te_module(q.shape[-2], k.shape[-2], q.shape[-1], layout, mask, window)
    packed: dict[str, Any] = {}
    if cu_seqlens is not None:
        longest = _with_longest(masking).max_seqlen
        packed = {
            "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens,
            "max_seqlen_q": longest, "max_seqlen_kv": longest,
        }  # fmt: skip
    return module(q.contiguous(), k.contiguous(), v.contiguous(), **packed).view(q.shape)
