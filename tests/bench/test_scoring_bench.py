"""The scoring benchmark on a toy: both sides give the same scores, and the rows say what they should."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from genomoe.bench.scoring import ScoringCase, run_scoring, scoring_cases
from genomoe.model.config import ModelConfig

TINY = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    expert_size=32,
    num_experts=4,
    top_k=2,
    max_context=64,
    initializer_std=0.1,
)


@pytest.mark.parametrize(
    ("mode", "amount", "strands"), [("centred", {"scattered": 5}, "both"), ("block", {"saturated": 6}, "fwd")]
)
def test_scores_are_the_same_on_both_sides(mode, amount, strands):
    case = ScoringCase(name="toy", model=TINY, window=64, window_mode=mode, strands=strands, **amount)
    rows = run_scoring("cpu", cases=[case], repeats=1)
    assert [row["implementation"] for row in rows] == [
        "huggingface-ref-and-alt", "huggingface-ref-once", "genomoe"
    ]  # fmt: skip
    assert all(row["variants"] == (5 if mode == "centred" else 18) for row in rows)
    assert all(row["attention"] == "_scaled_dot_product_flash_attention_for_cpu" for row in rows[:2])
    assert rows[-1]["largest_score_difference"] < 1e-4
    assert rows[-1]["score_deviation"] > 0.01
    assert rows[-1]["speedup_over_huggingface_ref_once"] > 0


def test_a_spent_budget_is_recorded():
    case = ScoringCase(name="toy", model=TINY, window=64, window_mode="centred", scattered=2)
    rows = run_scoring("cpu", cases=[case], repeats=1, time_budget=1e-9)
    assert len(rows) == 3
    assert all("time budget" in row["error"] for row in rows)


def test_cases_cover_both_goals():
    for device in ("cpu", "cuda"):
        assert {"scattered-centred", "saturation-block"} <= {case.name for case in scoring_cases(device)}
