"""How FlashAttention-4 is called: by a stand-in for the package that takes its arguments literally.

The package itself is compared with the reference on a GPU in `test_attention.py` and `test_prefix_attention.py`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch

from genomoe.ops import attention as module
from genomoe.ops import attention_flash4
from genomoe.ops.attention import attention, select_attention
from genomoe.ops.attention_flash4 import flash4_forward


def flash_attn_fwd(
    q, k, v, *, causal=False, window_size_left=None, window_size_right=None, return_lse=False,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
):  # fmt: skip
    """Output and log sum exp by the package's conventions; [B, S, H, C] and [B, H, S], or [T, H, C] and [H, T]."""
    assert return_lse
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q.diff().tolist()
        assert cu_seqlens_k is cu_seqlens_q or torch.equal(cu_seqlens_k, cu_seqlens_q)
        assert max_seqlen_q == max_seqlen_k == max(lengths)
        masks = {"causal": causal, "window_size_left": window_size_left, "window_size_right": window_size_right}
        parts = [
            flash_attn_fwd(*(x[None] for x in part), return_lse=True, **masks)
            for part in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        ]
        return torch.cat([out[0] for out, *_ in parts]), torch.cat([lse[0] for _, lse, *_ in parts], dim=1), None
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    score_BHSK = torch.einsum("bshc,bkhc->bhsk", q, k) / q.shape[3] ** 0.5
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if causal:
        hidden |= behind < 0
    if window_size_left is not None:
        hidden |= behind > window_size_left
    if window_size_right is not None:
        hidden |= -behind > window_size_right
    score_BHSK = score_BHSK.masked_fill(hidden, float("-inf"))
    out = torch.einsum("bhsk,bkhc->bshc", score_BHSK.softmax(-1), v)
    return out.contiguous(), score_BHSK.logsumexp(-1), None


def flash_attn_bwd(q, k, v, out, dout, lse, *, deterministic, **masks):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        again, sums, _ = flash_attn_fwd(*leaves, return_lse=True, **masks)
        torch.testing.assert_close(again, out)
        torch.testing.assert_close(sums, lse)
        return (*torch.autograd.grad(again, leaves, dout), deterministic)


@pytest.fixture
def package(monkeypatch) -> None:
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = flash_attn_fwd, flash_attn_bwd  # type: ignore[attr-defined]
    cute = ModuleType("flash_attn.cute")
    cute.interface = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setattr(module, "flash4_missing", lambda: None)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 1), (True, 5)])
@pytest.mark.parametrize("lengths", [None, [5, 1, 17, 3]], ids=["fixed", "packed"])
def test_masks_and_layouts_are_told_as_the_package_wants_them(lengths, causal, window) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(26, heads, 32, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    weight = torch.randn(26, 4, 32, generator=generator)
    layout: dict = {}
    shaped = [x.unflatten(0, (2, 13)) for x in leaves]
    if lengths is not None:
        layout = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)}
        shaped = leaves

    def run(backend: str) -> list[torch.Tensor]:
        out = attention(*shaped, **layout, causal=causal, window=window, backend=backend).flatten(0, -3)
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]

    for name, a, b in zip(("out", "dq", "dk", "dv"), run("flash4"), run("reference"), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.usefixtures("package")
def test_it_is_an_operation_that_torch_knows() -> None:
    q, k = torch.randn(2, 7, 4, 8), torch.randn(2, 9, 2, 8)
    torch.library.opcheck(flash4_forward, (q, k, k, None, 7, False, None))
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    torch.library.opcheck(flash4_forward, (q[0], q[0], q[0], starts, 4, True, 2))


def test_it_is_taken_where_it_pays_and_refused_where_it_is_missing(monkeypatch) -> None:
    q = torch.randn(1, 6, 2, 8)
    monkeypatch.setattr(module, "flash4_missing", lambda: "flash-attn-4 is not installed")
    with pytest.raises(ValueError, match="'flash4' cannot run: flash-attn-4 is not installed"):
        attention(q, q, q, backend="flash4")
    monkeypatch.setattr(module, "flash4_missing", lambda: None)
    with pytest.raises(ValueError, match="head sizes that are multiples of 32, not 8"):
        attention(q, q, q, backend="flash4")
    monkeypatch.setattr(module, "flash4_missing", lambda: "flash-attn-4 is not installed")
    cuda = torch.device("cuda")
    choice = select_attention(cuda, torch.bfloat16, packed=True, window=False)
    assert (choice.name, choice.others["flash4"]) == ("varlen", "flash-attn-4 is not installed")
    monkeypatch.setattr(module, "flash4_pays", lambda dtype, head_size: head_size == 64)
    assert select_attention(cuda, torch.bfloat16, packed=True, window=True).name == "flash4"
    assert select_attention(cuda, torch.bfloat16, packed=False, window=False, head_size=256).name == "sdpa"


@pytest.mark.usefixtures("package")
def test_heads_whose_backward_pass_does_not_compile_are_left_to_others(monkeypatch) -> None:
    monkeypatch.setattr(attention_flash4, "flash4_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    taken = [size for size in range(8, 265, 8) if attention_flash4.flash4_pays(torch.bfloat16, size)]
    assert taken == [32, 64, 96, 128]
    choice = select_attention(torch.device("cuda"), torch.bfloat16, packed=False, window=False, head_size=16)
    assert (choice.name, choice.others["flash4"]) == (
        "sdpa",
        "its backward pass takes head sizes that are multiples of 32, not 16",
    )


def test_an_installation_that_does_not_load_is_left_aside_with_the_reason(package, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.0")
    missing = attention_flash4.flash4_missing.__wrapped__
    assert missing() is None
    del sys.modules["flash_attn.cute"].interface._flash_attn_bwd  # type: ignore[attr-defined]
    assert "flash-attn-4 4.0.0 does not load (AttributeError: " in missing()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "9.0 or higher" in missing()
