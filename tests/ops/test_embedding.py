"""The embedding's gradient as a product equals PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from genomoe.ops import embedding


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_gradient(monkeypatch, at_once) -> None:
    monkeypatch.setattr(embedding, "ONE_HOT_AT_ONCE", at_once)
    weight = torch.randn(7, 5, dtype=torch.float64).requires_grad_()
    tokens = torch.randint(0, 6, (23,))
    grad = torch.randn(23, 5, dtype=torch.float64)
    (want,) = torch.autograd.grad(F.embedding(tokens, weight), weight, grad)
    out = embedding._Embed.apply(tokens, weight)
    assert torch.equal(out, F.embedding(tokens, weight))
    (got,) = torch.autograd.grad(out, weight, grad)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # summed in float32
    assert not got[6].any()
