"""The step benchmark: rows of both implementations, failures recorded, the budget kept, results written early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from genomoe.bench import step
from genomoe.bench.context import context_cases
from genomoe.bench.report import write_result
from genomoe.bench.step import StepCase, measure, run_cases, step_cases
from genomoe.model import KernelOptions, ModelConfig
from genomoe.training.planning import DEVICES, GIB, StepShape, predict_peak, step_seconds

RESULTS = Path(__file__).parents[2] / "docs" / "results"
TINY = ModelConfig.preset(
    "tiny", hidden_size=32, num_layers=2, expert_size=32, num_experts=4, head_size=8, max_context=64
)
CPU = torch.device("cpu")


def case(implementation: str, **more) -> StepCase:
    fields = {"case": "tiny", "model": TINY, "batch": 2, "context": 32, "warmups": 1, "repeats": 1, **more}
    return StepCase(implementation=implementation, **fields)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize("activation", ["none", "mlp", "layer", "layer+attention"])
def test_ours(activation, optimizer) -> None:
    row = measure(case("genomoe-reference", activation=activation, optimizer=optimizer), CPU, None)
    assert "error" not in row
    assert row["tokens"] == 64
    assert row["tokens_per_s"] > 0
    assert "predicted_peak_gib" in row


@pytest.mark.parametrize("implementation", ["hf-loop", "hf-grouped_mm"])
@pytest.mark.parametrize("activation", ["none", "layer"])
def test_hugging_face(implementation, activation) -> None:
    pytest.importorskip("transformers")
    row = measure(case(implementation, activation=activation), CPU, None)
    assert "error" not in row, row
    assert row["tokens_per_s"] > 0


@pytest.mark.parametrize("implementation", ["genomoe-reference", "hf-loop"])
def test_a_row_is_of_the_steady_state(implementation, monkeypatch) -> None:
    pytest.importorskip("transformers")
    steps: list[tuple[int, bool]] = []
    real = step._step

    def recording(subject, optimizer, context):
        steps.append((context, bool(optimizer.state)))
        return real(subject, optimizer, context)

    monkeypatch.setattr(step, "_step", recording)
    monkeypatch.setattr(step, "SHORT", 8)
    row = measure(case(implementation, warmups=0), CPU, None)
    assert steps == [(8, False), (32, True)]  # the optimizer has its moments before anything is measured
    assert row["attention"] == "_scaled_dot_product_flash_attention_for_cpu"


def test_both_start_from_the_same_loss() -> None:
    pytest.importorskip("transformers")
    ours = measure(case("genomoe-reference", warmups=0), CPU, None)["loss"]
    theirs = measure(case("hf-loop", warmups=0), CPU, None)["loss"]
    assert ours == pytest.approx(theirs, rel=0.05)  # ln V and small router losses, other random weights


def test_a_failing_case_is_a_row_and_the_next_one_runs(tmp_path) -> None:
    out = tmp_path / "step.json"
    written: list[int] = []

    def report(rows) -> None:
        written.append(len(write_result(out, rows)["rows"]))

    cases = [case("genomoe-fast"), case("genomoe-reference"), case("genomoe-reference", seconds=1e6)]
    rows = run_cases(cases, device="cpu", time_budget=600, report=report)
    assert written == [1, 2, 3]
    assert "no expert backend 'fast'" in rows[0]["error"]
    assert "error" not in rows[1]
    assert "not run" in rows[2]["error"]
    assert json.loads(out.read_text())["rows"] == rows


def test_patterns_choose_cases() -> None:
    rows = run_cases([case("genomoe-reference"), case("hf-loop")], device="cpu", only=["*/genomoe-*"], report=len)
    assert [row["implementation"] for row in rows] == ["genomoe-reference"]
    with pytest.raises(ValueError, match="no case matches"):
        run_cases(step_cases(), device="cpu", only=["nothing"], report=len)


def test_the_lists_cover_the_goals() -> None:
    names = [one.name for one in (*step_cases(), *context_cases())]
    assert len(set(names)) == len(names)
    for wanted in ("genos-1.2b 4x8192/hf-loop", "mixtral-8x7b", "64 experts", "1x512k/hf-grouped_mm", "1x1M", "1x4M"):
        assert any(wanted in name for name in names), wanted


MEASURED = [
    row
    for path in (*RESULTS.glob("step*-h200.json"), *RESULTS.glob("context*-h200.json"))
    for row in json.loads(path.read_text())["rows"]
    if row["implementation"].startswith("genomoe-") and "peak_gib" in row
]


@pytest.mark.skipif(not MEASURED, reason="docs/results holds no measured steps")
def test_predictions_agree_with_what_was_measured() -> None:
    def key(of) -> tuple[str, ...]:
        return tuple(of[field] for field in ("case", "implementation", "precision", "save", "activation"))

    cases = {key(vars(one)): one for one in (*step_cases(), *context_cases())}
    for row in MEASURED:
        one = cases[key(row)]
        kernels = KernelOptions(
            experts=one.implementation.removeprefix("genomoe-"), precision=one.precision, save=one.save,
            chunk_tokens=one.chunk_tokens, attention="flash4" if "flash4" in row["attention"] else "sdpa",
        )  # fmt: skip
        predicted = predict_peak(
            one.model, batch=one.batch, context=one.context, kernels=kernels, policy=one.activation,
            optimizer=one.optimizer,
        )  # fmt: skip
        assert predicted / GIB == pytest.approx(row["peak_gib"], rel=0.1), one.name
        if row["implementation"] == "genomoe-fused":
            shape = StepShape(
                context=one.context, batch=one.batch, kernels=kernels, policy=one.activation, optimizer=one.optimizer
            )
            seconds = sum(step_seconds(one.model, shape, DEVICES["h200"]).values())
            assert seconds == pytest.approx(row["step_s"], rel=0.15), one.name
