"""Attention in two parts equals attention over all keys at once, over odd sizes, with several sequences a prefix."""

from __future__ import annotations

import pytest
import torch

from genomoe.ops import prefix_attention as module
from genomoe.ops.prefix_attention import (
    Part,
    attend_part,
    attend_part_reference,
    join_parts,
    prefix_attention,
    windowed_attention,
)

SHAPES = [(1, 1, 1, 0), (1, 1, 1, 1), (2, 3, 5, 7), (3, 2, 64, 64), (2, 1, 129, 40), (1, 4, 33, 0), (2, 2, 3, 150)]
"""W windows, N sequences of a window, L tokens of a sequence, P tokens of the prefix."""


def inputs(W, N, L, P, H=4, G=2, C=8, dtype=torch.float64, device="cpu"):
    """q, k, v [W, N, L, heads, C], views of one joint buffer as the model's are, and keys and values [W, P, G, C]."""
    random = torch.Generator().manual_seed(0)
    joint = torch.randn(W, N, L, H + 2 * G, C, generator=random, dtype=torch.float64).mul(2).to(device, dtype)
    prefix = torch.randn(2, W, P + 3, G, C, generator=random, dtype=torch.float64).mul(2).to(device, dtype)
    return *joint.split([H, G, G], dim=3), prefix[0, :, :P], prefix[1, :, :P]


def dense(q, k, v, prefix_k, prefix_v, window=None):
    """Every sequence whole, in float64: prefix and own keys side by side, a mask written out."""
    W, N, L, H, C = q.shape
    P = prefix_k.shape[1]
    out = torch.empty(W, N, L, H, C, dtype=torch.float64)
    for w in range(W):
        for n in range(N):
            keys, values = (torch.cat([p[w], x[w, n]]).double() for p, x in ((prefix_k, k), (prefix_v, v)))
            for h in range(H):
                g = h // (H // k.shape[3])
                score = q[w, n, :, h].double() @ keys[:, g].T / C**0.5
                distance = torch.arange(P, P + L)[:, None] - torch.arange(P + L)
                hidden = (distance < 0) | (distance >= (window or P + L))
                out[w, n, :, h] = score.masked_fill(hidden, -torch.inf).softmax(-1) @ values[:, g]
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 1)], ids=str)
def test_prefix_attention_is_attention_over_all_keys(shape, heads):
    given = inputs(*shape, *heads)
    torch.testing.assert_close(prefix_attention(*given), dense(*given), atol=1e-12, rtol=0)
    single = prefix_attention(*(x.float() for x in given)).double()
    torch.testing.assert_close(single, dense(*given), atol=2e-5, rtol=0)  # scores reach 30: 2^-24 of that, and exp


def test_sequences_of_a_window_do_not_see_each_other():
    q, k, v, prefix_k, prefix_v = inputs(2, 3, 9, 6)
    whole = prefix_attention(q, k, v, prefix_k, prefix_v)
    alone = prefix_attention(q[1:, 2:], k[1:, 2:], v[1:, 2:], prefix_k[1:], prefix_v[1:])
    torch.testing.assert_close(whole[1:, 2:], alone, atol=1e-14, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 20, 64, 1000])
@pytest.mark.parametrize("stretch", [7, 64])
def test_windowed_attention_hides_what_is_too_far(shape, window, stretch):
    given = inputs(*shape)
    got = windowed_attention(*given, window=window, stretch=stretch)
    torch.testing.assert_close(got, dense(*given, window=window), atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("S", "K"), [(1, 1), (70, 70), (200, 200), (130, 9)])
def test_a_part_is_softmax_and_its_logarithm(S, K, causal):
    if causal and S != K:
        pytest.skip("causal parts are square")
    q, k, v = (x[0] for x in inputs(1, 2, max(S, K), 0)[:3])
    part, want = (f(q[:, :S], k[:, :K], v[:, :K], causal=causal) for f in (attend_part, attend_part_reference))
    torch.testing.assert_close(part.out_BSHC, want.out_BSHC, atol=1e-13, rtol=0)
    torch.testing.assert_close(part.lse_BSH, want.lse_BSH, atol=1e-12, rtol=0)
    first = torch.logsumexp(q[1, 0, 3] @ k[1, : 1 if causal else K, 1].T / 8**0.5, -1)
    torch.testing.assert_close(part.lse_BSH[1, 0, 3], first, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_join_equals_the_plain_one(dtype):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(1)
    outs = [torch.randn(3, 50, 6, 40, generator=random).to(device, dtype) for _ in range(2)]
    sums = [torch.randn(3, 6, 50, generator=random).mul(4).to(device).transpose(1, 2) for _ in range(2)]
    plain = join_parts(Part(outs[0], sums[0]), Part(outs[1], sums[1]), backend="torch")
    fused = join_parts(Part(outs[0].clone(), sums[0]), Part(outs[1], sums[1]), backend="triton")
    assert fused.dtype == dtype
    # one unit in the last place of bfloat16: Triton's interpreter truncates
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(fused, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("least", [0, 1 << 30], ids=["cudnn", "flash"])
@pytest.mark.parametrize("shape", [(2, 3, 192, 128), (2, 2, 129, 70), (1, 2, 64, 0)], ids=str)
def test_every_kernel_on_cuda(monkeypatch, shape, least, dtype):
    monkeypatch.setattr(module, "CUDNN_QUERIES", least)
    given = inputs(*shape, C=64, dtype=dtype, device="cuda")
    got = prefix_attention(*given).double().cpu()
    tolerance = 3e-5 if dtype == torch.float32 else 0.04  # values up to 8: sums, or two roundings to 8 bits
    torch.testing.assert_close(got, dense(*(x.cpu() for x in given)), atol=tolerance, rtol=0)
    q, k, v = (x.flatten(0, 1) for x in given[:3])
    part, want = attend_part(q, k, v, causal=True), attend_part_reference(q, k, v, causal=True)
    torch.testing.assert_close(part.lse_BSH, want.lse_BSH, atol=1e-3, rtol=1e-3)
