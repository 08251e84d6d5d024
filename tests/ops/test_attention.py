"""Attention backends agree; packing equals separate sequences; windows see what they should."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from genomoe.ops import attention as module
from genomoe.ops import attention_kernels
from genomoe.ops.attention import attention, select_attention
from genomoe.ops.attention_flash4 import flash4_missing

LENGTHS = [5, 1, 17, 0, 9]


def qkv(T: int, H: int = 4, G: int = 2, C: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(T, heads, C, generator=generator).requires_grad_() for heads in (H, G, G)]


def with_gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


@pytest.mark.parametrize("window", [None, 1, 4, 17, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_equals_the_reference(window, causal) -> None:
    if window is not None and not causal:
        pytest.skip("a window looks backwards only")
    leaves = qkv(2 * 19)
    shaped = [x.unflatten(0, (2, 19)) for x in leaves]
    got = with_gradients(attention(*shaped, causal=causal, window=window, backend="sdpa"), leaves)
    want = with_gradients(attention(*shaped, causal=causal, window=window, backend="reference"), leaves)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_packing_equals_separate_sequences(backend, window) -> None:
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).to(torch.int32)
    leaves = qkv(int(cu[-1]))
    packed = with_gradients(
        attention(*leaves, cu_seqlens=cu, max_seqlen=max(LENGTHS), window=window, backend=backend), leaves
    )
    alone = [
        attention(*(x[a:b][None] for x in leaves), window=window, backend="reference")[0]
        for a, b in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)
        if a < b
    ]
    for name, a, b in zip(("out", "dq", "dk", "dv"), packed, with_gradients(torch.cat(alone), leaves), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("largest", [1, 400, 10**6])
def test_heads_in_groups_equal_one_launch(monkeypatch, largest) -> None:
    def forward(q, k, v, masking):
        return attention(q, k, v, window=masking.window, backend="reference"), (q.sum(), k.sum())

    def backward(grad, q, k, v, out, kept, masking):
        assert torch.equal(kept[0], q.sum())
        assert torch.equal(kept[1], k.sum())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = attention(*leaves, window=masking.window, backend="reference")
        assert torch.equal(again, out)
        return torch.autograd.grad(again, leaves, grad)

    monkeypatch.setattr(attention_kernels, "LARGEST", largest)
    monkeypatch.setattr(attention_kernels, "is_large", lambda q: q.numel() > largest)
    leaves = qkv(2 * 13, H=12, G=6)
    shaped = [x.unflatten(0, (2, 13)) for x in leaves]
    masking = attention_kernels.Masking(cu_seqlens=None, max_seqlen=13, causal=True, window=5)
    kernel = attention_kernels.Kernel(forward=forward, backward=backward)
    groups = len(attention_kernels.head_groups(shaped[0], 6))
    assert groups == {1: 6, 400: 6, 10**6: 1}[largest]
    got = with_gradients(attention_kernels.call_kernel(*shaped, masking, kernel), leaves)
    want = with_gradients(attention(*shaped, window=5, backend="reference"), leaves)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("packed", [False, True])
def test_a_cache_saves_the_second_run(monkeypatch, packed) -> None:
    calls: list[int] = []
    real = module._sdpa_call

    def counting(*args):
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(module, "_sdpa_call", counting)
    leaves = qkv(2 * 13)
    layout: dict = {"cu_seqlens": torch.tensor([0, 26], dtype=torch.int32)} if packed else {}
    shaped = leaves if packed else [x.unflatten(0, (2, 13)) for x in leaves]
    cache = attention_kernels.AttentionCache()
    first = attention(*shaped, backend="sdpa", cache=cache, **layout)
    second = attention(*shaped, backend="sdpa", cache=cache, **layout)
    assert torch.equal(first, second)
    assert len(calls) == 1
    assert cache.kept is None
    want = with_gradients(attention(*shaped, backend="sdpa", **layout), leaves)
    for a, b in zip(with_gradients(second, leaves), want, strict=True):
        assert torch.equal(a, b)


def test_a_window_hides_what_is_older() -> None:
    q, k, v = (x.unflatten(0, (1, 12)).detach() for x in qkv(12))
    before = attention(q, k, v, window=4)
    k2, v2 = k.clone(), v.clone()
    k2[:, 3] += 100
    v2[:, 3] += 100
    changed = (attention(q, k2, v2, window=4) - before).abs().amax((0, 2, 3)) > 1e-6
    assert changed.tolist() == [False] * 3 + [True] * 4 + [False] * 5


def test_what_cannot_be_is_said() -> None:
    q, k, v = qkv(6)
    with pytest.raises(ValueError, match="cu_seqlens"):
        attention(q, k, v)
    with pytest.raises(ValueError, match="causal=True"):
        attention(q[None], k[None], v[None], causal=False, window=2)
    with pytest.raises(ValueError, match="no attention backend"):
        attention(q[None], k[None], v[None], backend="best")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'te' cannot run"):
            attention(q[None], k[None], v[None], backend="te")


def test_the_choice_comes_with_a_reason() -> None:
    assert select_attention(torch.device("cpu"), torch.float32, packed=False, window=False).name == "sdpa"
    cuda = torch.device("cuda")
    assert select_attention(cuda, torch.bfloat16, packed=False, window=False).name == "sdpa"
    choice = select_attention(cuda, torch.bfloat16, packed=True, window=True)
    assert choice.name == "varlen"
    assert "packed" in choice.reason
    assert "window" in choice.reason


@pytest.mark.parametrize("cudnn", [False, True])
def test_the_process_keeps_its_own_choice_of_kernels(cudnn, monkeypatch) -> None:
    def set_for_all(*_args) -> None:
        raise AssertionError("a setting of the whole process was touched")

    for name in dir(torch._C):
        if name.startswith(("_set_sdp_use_", "_set_sdp_priority_order")):
            monkeypatch.setattr(torch._C, name, set_for_all)
    called: list[attention_kernels.Kernel] = []

    def recording(q, k, v, masking, kernel, cache):
        called.append(kernel)
        return q

    monkeypatch.setattr(module, "cudnn_can_run", lambda *_: cudnn)
    monkeypatch.setattr(module, "call_kernel", recording)
    with FakeTensorMode():  # CUDA tensors without a device
        q, k = (torch.empty(2, 12, heads, 8, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
        assert attention(q, k, k, backend="sdpa").shape == q.shape
        mask = torch.empty(12, 12, device="cuda", dtype=torch.bool)
        assert module._sdpa_call(q, k, k, False, mask).shape == q.shape
    assert called == ([attention_kernels.CUDNN] if cudnn else [])


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="PyTorch prefers cuDNN from compute capability 9.0",
)
def test_other_models_still_get_cudnn_after_ours() -> None:
    script = """
import torch
from torch.profiler import ProfilerActivity, profile
from genomoe.ops.attention import attention

q = torch.randn(1, 512, 4, 64, device="cuda", dtype=torch.bfloat16)
for window in (None, 100):
    attention(q, q, q, window=window, backend="sdpa")
q = q.transpose(1, 2)
with profile(activities=[ProfilerActivity.CUDA]) as trace:
    torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.cuda.synchronize()
print(*(event.key for event in trace.key_averages()))
"""  # in a process of its own: PyTorch settles its preference at the first call
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "cudnn" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "flash4"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("largest", [1 << 29, 20_000], ids=["one launch", "head groups"])
def test_gpu_backends_equal_the_reference(backend, packed, window, largest, monkeypatch) -> None:
    if backend == "flash4" and (missing := flash4_missing()):
        pytest.skip(missing)
    monkeypatch.setattr(attention_kernels, "LARGEST", largest)
    monkeypatch.setattr(attention_kernels, "REACH", largest)
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = [
        torch.randn(512, heads, 64, device="cuda", generator=generator, dtype=torch.bfloat16).requires_grad_()
        for heads in (4, 2, 2)
    ]
    layout: dict = {
        "cu_seqlens": torch.tensor([0, 200, 201, 512], device="cuda", dtype=torch.int32),
        "max_seqlen": 311,
    }
    shaped = leaves
    if not packed:
        layout, shaped = {}, [x.unflatten(0, (2, 256)) for x in leaves]
    weight = torch.randn(512, 4, 64, device="cuda", generator=generator).view(shaped[0].shape)

    def run(name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        out = attention(*tensors, **layout, window=window, backend=name)
        return [out.detach(), *torch.autograd.grad(out, tensors, weight.to(out.dtype))]

    exact = [x.detach().float().requires_grad_() for x in shaped]
    got, want = run(backend, shaped), run("reference", exact)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert ((a.float() - b).norm() / b.norm()).item() < 1e-2, name  # bfloat16 probabilities


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cudnn_takes_views_of_the_joint_projection() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("cuDNN attention needs compute capability 8.0")
    qkv = torch.randn(2, 256, 32, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split([16, 8, 8], dim=2)
    assert attention_kernels.cudnn_can_run(q, k, v, causal=True)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, backend="sdpa"), want.transpose(1, 2))
