"""Every expert backend equals the reference, values and gradients, also where routing is degenerate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from genomoe.ops.grouped_mlp import grouped_mlp
from genomoe.ops.grouped_mlp.reference import grouped_mlp_reference

# relative error (Frobenius) of each tensor; float32 leaves only the order of summation
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN, so a row or weight gradient nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def routing(case: str, T: int, E: int, K: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(T)
    if case == "one expert":
        return torch.stack([(torch.full((T,), E - 1) - k) % E for k in range(K)], 1)
    if case == "empty expert":
        return 1 + torch.rand(T, E - 1, generator=generator).topk(K).indices
    return torch.rand(T, E, generator=generator).topk(K).indices


CASES = [
    ("random", 61, 5, 2),
    ("random", 1, 4, 2),
    ("random", 17, 4, 4),  # K = E
    ("random", 0, 4, 2),  # a rank without a token
    ("one expert", 33, 6, 1),
    ("one expert", 33, 6, 3),
    ("empty expert", 40, 5, 2),
]


def inputs(case: str, T: int, E: int, K: int, dtype: torch.dtype, D: int = 32, I: int = 48):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    w_up = (torch.randn(E, 2 * I, D, generator=generator) / D**0.5).to(dtype).requires_grad_()
    w_down = (torch.randn(E, D, I, generator=generator) / I**0.5).to(dtype).requires_grad_()
    scores = torch.rand(T, K, generator=generator).softmax(-1).requires_grad_()
    return x, w_up, w_down, routing(case, T, E, K), scores


def gradients(y: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    grads = torch.autograd.grad(y, list(leaves.values()), weight)
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 7}, {"save": "recompute", "chunk_tokens": 16}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "grouped_mm"])
@pytest.mark.parametrize(("case", "T", "E", "K"), CASES)
def test_backends_equal_the_reference(case, T, E, K, backend, options, dtype) -> None:
    x, w_up, w_down, index, scores = inputs(case, T, E, K, dtype)
    leaves = {"x": x, "w_up": w_up, "w_down": w_down, "scores": scores}
    exact = [t.detach().float().requires_grad_() for t in leaves.values()]
    want = gradients(
        grouped_mlp_reference(exact[0], exact[1], exact[2], index, exact[3]),
        dict(zip(leaves, exact, strict=True)),
    )
    got = gradients(grouped_mlp(x, w_up, w_down, index, scores, backend=backend, **options), leaves)
    for name, value in got.items():
        assert value.isfinite().all(), name
        error = (value.float() - want[name]).norm() / want[name].norm().clamp(min=1e-20)
        assert error < TOLERANCE[dtype] or want[name].norm() == 0 == value.float().norm(), (name, error)
    used = set(index.flatten().tolist())
    for expert in set(range(E)) - used:
        assert not got["w_up"][expert].any()
        assert not got["w_down"][expert].any()


@pytest.mark.parametrize("backend", ["reference", "grouped_mm"])
def test_a_residual_is_added_and_takes_the_gradient_as_it_is(backend) -> None:
    x, w_up, w_down, index, scores = inputs("random", 61, 5, 2, torch.float32)
    residual = torch.randn(x.shape, requires_grad=True)
    leaves = {"x": x, "w_up": w_up, "w_down": w_down, "scores": scores, "residual": residual}
    want = gradients(residual + grouped_mlp_reference(x, w_up, w_down, index, scores), leaves)
    options = {"backend": backend, "chunk_tokens": 16}
    got = gradients(grouped_mlp(x, w_up, w_down, index, scores, residual_TD=residual, **options), leaves)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], msg=name)


def test_the_reference_equals_a_sum_worked_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0]])
    w_up = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])  # I = 1: gate row, up row
    w_down = torch.tensor([[[1.0], [0.0]], [[0.0], [10.0]]])
    silu = torch.nn.functional.silu
    expected = torch.tensor([[0.25 * silu(torch.tensor(1.0)) * 2, 0.75 * 10 * silu(torch.tensor(2.0)) * 1]])
    got = grouped_mlp_reference(x, w_up, w_down, torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.75]]))
    torch.testing.assert_close(got, expected)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, w_up, w_down, index, scores = inputs("random", 4, 4, 2, torch.float32)
    with pytest.raises(ValueError, match=r"expected \[T, D\]"):
        grouped_mlp(x[:, :8], w_up, w_down, index, scores)
    with pytest.raises(ValueError, match="no expert backend 'fast'"):
        grouped_mlp(x, w_up, w_down, index, scores, backend="fast")
