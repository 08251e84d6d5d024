"""The chunked cross-entropy equals PyTorch's, values and gradients, and holds no more logits than a chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from genomoe.ops import loss as module
from genomoe.ops.loss import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(T: int = 37, D: int = 24, V: int = 11, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, D, generator=generator).to(DEVICE, dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(DEVICE, dtype).requires_grad_()
    labels = torch.randint(0, V, (T,), generator=generator).to(DEVICE)
    weights = torch.rand(T, generator=generator).to(DEVICE)
    weights[::5] = 0
    return hidden, weight, labels, weights


@pytest.mark.parametrize("z_coef", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [None, 1, 8, 37, 1000])
def test_equals_pytorch(chunk, z_coef) -> None:
    hidden, weight, labels, weights = inputs()
    logits = hidden.double() @ weight.double().t()
    nats = F.cross_entropy(logits, labels, reduction="none")
    want = (weights * (nats + z_coef * logits.logsumexp(1).square())).sum()
    got = linear_cross_entropy(hidden, weight, labels, weights, chunk=chunk, z_coef=z_coef)
    assert got.weighted_nats.item() == pytest.approx(want.item(), rel=1e-6)
    assert got.nats.item() == pytest.approx(nats[weights > 0].sum().item(), rel=1e-6)
    exact = torch.autograd.grad(3 * want, (hidden, weight))
    for name, a, b in zip(("hidden", "weight"), torch.autograd.grad(3 * got[0], (hidden, weight)), exact, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-6, name


def test_bfloat16_logits_are_not_rounded() -> None:
    hidden, weight, labels, weights = inputs(dtype=torch.bfloat16)
    exact = (F.cross_entropy(hidden.double() @ weight.double().t(), labels, reduction="none") * weights).sum()
    got = linear_cross_entropy(hidden, weight, labels, weights).weighted_nats
    assert got.item() == pytest.approx(exact.item(), rel=1e-6)


def test_no_gradient_means_no_work_for_it() -> None:
    hidden, weight, labels, weights = inputs()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels, weights).weighted_nats.requires_grad
    got = linear_cross_entropy(hidden, weight.detach(), labels, weights).weighted_nats
    got.backward(retain_graph=True)
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="backward once"):
        got.backward()


def test_no_more_logits_than_a_chunk(monkeypatch) -> None:
    sizes: list[int] = []
    real = module.wide_mm

    def spying(a, b):
        sizes.append(a.shape[0])
        return real(a, b)

    monkeypatch.setattr(module, "wide_mm", spying)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 110)
    hidden, weight, labels, weights = inputs()
    linear_cross_entropy(hidden, weight, labels, weights)
    assert max(size for size in sizes if size != weight.shape[0]) == 10
