"""The scoring benchmark on a toy: both sides give the same scores, and the rows say what they should."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

import transformers

from genomoe.bench.arbiter import in_float64
from genomoe.bench.scoring import run_scoring
from genomoe.bench.scoring_cases import ScoringCase, scoring_cases
from genomoe.bench.scoring_peer import HuggingFaceLoop
from genomoe.inference.engine import Pair
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
    for row in rows:
        assert row["float64_pairs"] == min(16, 10 if mode == "centred" else 18)
        assert 0 < row["rms_difference_from_float64"] <= row["largest_difference_from_float64"] < 1e-4
        assert row["rank_correlation_with_float64"] > 0.99
    for side in ("", "huggingface_"):
        assert 0 < rows[-1][f"{side}largest_difference_from_float64_float32"] < 1e-4


def test_the_arbiter_computes_in_float64_throughout():
    """Nothing is rounded to float32 on the way: float64 rounding apart, it does what the float32 model does."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 5e7}, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    exact = in_float64(model)
    tokens = torch.randint(0, 16, (1, 50))
    with torch.inference_mode(), RecordDtypes() as seen:
        logits = exact(tokens, use_cache=False).logits
    assert torch.float64 in seen.dtypes
    assert seen.dtypes.isdisjoint({torch.float32, torch.bfloat16, torch.float16})
    torch.testing.assert_close(logits, model(tokens).logits.double(), atol=1e-5, rtol=1e-5)
    assert next(model.parameters()).dtype == torch.float32, "a copy"


class RecordDtypes(TorchDispatchMode):
    """Notes the dtype of every floating-point tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        self.dtypes |= {x.dtype for x in found if x.numel() > 1}
        return out


def test_a_spent_budget_is_recorded():
    case = ScoringCase(name="toy", model=TINY, window=64, window_mode="centred", scattered=2)
    rows = run_scoring("cpu", cases=[case], repeats=1, time_budget=1e-9)
    assert len(rows) == 3
    assert all("time budget" in row["error"] for row in rows)


def test_rows_are_reported_before_the_arbiter_starts(monkeypatch):
    case = ScoringCase(name="toy", model=TINY, window=64, window_mode="centred", scattered=4)
    reports: list[list[dict]] = []

    def failing(self, pairs, deadline):
        assert [row["seconds"] > 0 for row in reports[-1]] == [True] * 3, "all that was timed is safe"
        raise RuntimeError("out of memory")

    monkeypatch.setattr(HuggingFaceLoop, "float64_scores", failing)
    rows = run_scoring("cpu", cases=[case], repeats=1, report=lambda rows: reports.append([*rows]))
    assert rows[-1]["arbiter_error"] == "RuntimeError: out of memory"


def test_the_arbiter_stops_when_its_time_is_over():
    torch.manual_seed(0)
    loop = object.__new__(HuggingFaceLoop)
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    loop.models, loop.choice = {"eager": transformers.MixtralForCausalLM(config).eval()}, "eager"
    ids = torch.randint(4, 8, (2, 30), dtype=torch.uint8).numpy()
    pair = Pair(ref=ids[0], alt=ids[1], first=0, end=30, ref_after=1, alt_after=1)
    assert len(loop.float64_scores([pair] * 3, deadline=time.monotonic() - 1)) == 0
    assert len(loop.float64_scores([pair] * 3, deadline=time.monotonic() + 60)) == 3


def test_cases_cover_both_goals():
    for device in ("cpu", "cuda"):
        assert {"scattered-centred", "saturation-block"} <= {case.name for case in scoring_cases(device)}
