"""`genomoe bench layer` without a GPU: its truth, its routing, its guards."""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch

from genomoe.bench import sonicmoe
from genomoe.bench.layer import CASES, LayerCase, float64_truth, make_tensors, relative_errors, time_limit
from genomoe.ops.grouped_mlp import grouped_mlp

SMALL = LayerCase(name="small", tokens=300, hidden=32, width=64, experts=8, top_k=2)


def test_the_truth_is_what_the_reference_computes() -> None:
    tensors = make_tensors(SMALL, torch.device("cpu"))
    leaves = [t.double().requires_grad_() for t in (tensors.x, tensors.w_up, tensors.w_down, tensors.scores)]
    out = grouped_mlp(*leaves[:3], tensors.index, leaves[3], backend="reference")
    out.backward(tensors.dy.double())
    truth = float64_truth(*(t.detach() for t in leaves[:3]), tensors.index, leaves[3].detach(), tensors.dy)
    errors = relative_errors(truth, out.detach(), leaves[0], leaves[3], leaves[1:3])
    assert set(errors) == {"error_out", "error_dx", "error_dw_up", "error_dw_down", "error_dscores"}
    assert max(errors.values()) < 1e-6  # the reference accumulates in float32


def test_an_error_in_one_weight_gradient_shows() -> None:
    tensors = make_tensors(SMALL, torch.device("cpu"))
    leaves = [t.double().requires_grad_() for t in (tensors.x, tensors.w_up, tensors.w_down, tensors.scores)]
    out = grouped_mlp(*leaves[:3], tensors.index, leaves[3], backend="reference")
    out.backward(tensors.dy.double())
    leaves[1].grad[0, :5] *= 1.5
    errors = relative_errors(tensors.truth, out.detach(), leaves[0], leaves[3], leaves[1:3])
    assert errors["error_dw_up"] > 0.01 > errors["error_dw_down"]


@pytest.mark.parametrize("routing", ["balanced", "zipf", "quarter-empty"])
def test_routing(routing: str) -> None:
    case = LayerCase(name=routing, tokens=4000, hidden=32, width=32, experts=8, top_k=2, routing=routing)
    load = make_tensors(case, torch.device("cpu")).index.flatten().bincount(minlength=8).float() / 8000
    if routing == "balanced":
        assert load.max() < 1.2 / 8
    elif routing == "zipf":
        assert load[0] > 2 * load[3] > 0
    else:
        assert (load[6:] == 0).all()
        assert (load[:6] > 0).all()


def test_case_names_are_unique_and_flops_count_six_products() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert SMALL.flops == 3 * 2 * 300 * 2 * (32 * 2 * 64 + 64 * 32)


def test_a_peer_that_does_not_end_is_given_up() -> None:
    started = time.perf_counter()
    with pytest.raises(TimeoutError, match="not done after 1 s"), time_limit(1):
        time.sleep(20)
    assert time.perf_counter() - started < 5


@pytest.mark.skipif(importlib.util.find_spec("sonicmoe") is not None, reason="SonicMoE is installed")
def test_preparing_a_peer_that_is_missing_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sonicmoe, "TILES", sonicmoe.TILES[:1])
    told: list[str] = []
    shape = sonicmoe.Shape(32, 64, 8, 2)
    sonicmoe.prepare([shape, shape], told.append)  # the same shape is compiled once
    assert len(told) == 1
    assert "hidden=32" in told[0]
    assert "Error" in told[0]
