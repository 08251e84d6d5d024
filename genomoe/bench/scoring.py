"""Variants per second of our scoring beside a well-batched Hugging Face loop: same weights, windows and scores.

The loop (`genomoe.bench.scoring_peer`) runs every window whole in batches of as many tokens as ours. It comes in two
forms: a REF and an ALT window for every variant, and, stronger, each distinct REF window once. Windows are prepared
before the clock starts for both, so the figures are of the model's work. On a CPU the clock is the process's own CPU
time, which other processes do not disturb (run it with one thread: OMP_NUM_THREADS=1). Every row of ours says how far
the scores of both are apart, and every row how well some of its scores follow those in float64
(`genomoe.bench.arbiter`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from genomoe.bench.arbiter import agreement
from genomoe.bench.device import free
from genomoe.bench.interleaved import in_short, interleaved
from genomoe.bench.scoring_cases import ScoringCase, case_pairs, scoring_cases
from genomoe.bench.scoring_peer import HuggingFaceLoop
from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.inference.engine import Pair, PairScorer
from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.transformer import GenoMoEModel, Layer

__all__ = ["run_scoring"]

Row = dict[str, Any]
FORMS = ("ref-and-alt", "ref-once")
UNK = NucleotideTokenizer().unk_id
ARBITRATED = 16
"""So many pairs are also scored in float64, and on a GPU in float32."""


def run_scoring(
    device: str,
    *,
    cases: Sequence[ScoringCase] | None = None,
    repeats: int = 3,
    precisions: Sequence[str] = ("bf16",),
    time_budget: float | None = None,
    report: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """Rows of every case and implementation, also handed to `report` as they come; what the arbiter says is added last.

    Args:
        device: "cpu" (float32) or a CUDA device (bfloat16 weights, and some scores in float32).
        repeats: the best of so many runs counts; all implementations run in turn.
        precisions: of our expert products, one row each.
        time_budget: seconds after which remaining measurements are recorded as not run.
    """
    rows: list[Row] = []
    deadline = time.monotonic() + (time_budget or float("inf"))

    def add(row: Row) -> None:
        rows.append(row)
        if report is not None:
            report(rows)

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for config, alike in itertools.groupby(cases or scoring_cases(device), key=lambda case: case.model):
        ours = _model(config, device, dtype)
        loop = HuggingFaceLoop(ours, device, dtype)
        measured = [_run_case(case, ours, loop, device, repeats, precisions, deadline, add) for case in alike]
        for left, case in zip(range(len(measured), 0, -1), measured, strict=True):
            _judge(case, ours, loop, time.monotonic() + (deadline - time.monotonic()) / left)
            if report is not None:
                report(rows)
        del ours, loop
        free(device)
    return rows


class _Measured(NamedTuple):
    """What a case gave: rows and scores by name, ours first in `ours`, for the arbiter to add to."""

    pairs: list[Pair]
    rows: dict[str, Row]
    scores: dict[str, np.ndarray]
    ours: str


def _run_case(
    case: ScoringCase,
    ours: GenoMoEModel,
    loop: HuggingFaceLoop,
    device: str,
    repeats: int,
    precisions: Sequence[str],
    deadline: float,
    add: Callable[[Row], None],
) -> _Measured:
    pairs = case_pairs(case, ours)
    count = len(pairs) // (1 if case.strands == "fwd" else 2)
    base = {
        "case": case.name,
        "window": case.window,
        "window_mode": case.window_mode,
        "strands": case.strands,
        "variants": count,
        "dtype": str(ours.embed.weight.dtype).removeprefix("torch."),
        "clock": "process CPU time" if device == "cpu" else "wall",
        "threads": torch.get_num_threads(),
    }
    experts = loop.choose_experts(pairs, case.batch_tokens, device)
    names: dict[str, Row] = {}
    runs: dict[str, Callable[[], np.ndarray]] = {}
    for form in FORMS:
        name = f"huggingface-{form}"
        names[name] = {"implementation": name, "experts": experts, "attention": loop.attention}
        runs[name] = partial(loop.scores, pairs, case.batch_tokens, ref_once=form == "ref-once")
    for precision in precisions:
        names[precision] = {"implementation": "genomoe", "precision": precision}
        runs[precision] = partial(_our_scores, ours, pairs, case.batch_tokens, precision)
    seconds, scores, errors = interleaved(runs, repeats, device, deadline)
    expected = scores.get("huggingface-ref-and-alt")
    rows = {name: {**base, **told} for name, told in names.items()}
    for name, row in rows.items():
        if name in errors:
            add(row | {"error": errors[name]})
            continue
        row |= {"seconds": round(seconds[name], 4), "variants_per_s": round(count / seconds[name], 2)}
        if row["implementation"] == "genomoe":
            for form in FORMS:
                if f"huggingface-{form}" in seconds:
                    ratio = seconds[f"huggingface-{form}"] / seconds[name]
                    row[f"speedup_over_huggingface_{form.replace('-', '_')}"] = round(ratio, 3)
            if expected is not None:
                row["largest_score_difference"] = float(np.abs(scores[name] - expected).max())
                row["score_deviation"] = float(np.std(expected))
                row["score_correlation"] = float(np.corrcoef(scores[name], expected)[0, 1])
        add(row)
    return _Measured(pairs, rows, {name: scores[name] for name in rows if name not in errors}, precisions[0])


def _judge(case: _Measured, ours: GenoMoEModel, loop: HuggingFaceLoop, deadline: float) -> None:
    """Adds to a case's rows how far some of its scores, and both sides' in float32, are from those in float64."""
    few = np.unique(np.linspace(0, len(case.pairs) - 1, ARBITRATED).round().astype(int))
    device = str(ours.embed.weight.device)
    now = time.monotonic()
    if now > deadline:
        return
    try:
        few = np.concatenate([few[start::4] for start in range(4)])  # spread, however many there is time for
        exact = loop.float64_scores([case.pairs[index] for index in few], now + (deadline - now) * 2 / 3)
        few = few[: len(exact)]
        if len(few) < 2:
            return
        for name, scores in case.scores.items():
            case.rows[name] |= agreement(scores[few], exact)
        free(device)
        expected = loop.float32_scores([case.pairs[index] for index in few])
        free(device)
        scorer = PairScorer(_model_like(ours, torch.float32), "llr", unk_id=UNK, batch_tokens=65536)
        got = scorer([case.pairs[index] for index in few])
        del scorer
    except (RuntimeError, ValueError) as error:
        case.rows[case.ours]["arbiter_error"] = in_short(error)
        return
    finally:
        free(device)
    case.rows[case.ours] |= {
        "largest_score_difference_float32": float(np.abs(got - expected).max()),
        # a tie of two experts that a rounding decides differently stands out of the largest, not of the median
        "median_score_difference_float32": float(np.median(np.abs(got - expected))),
        "largest_difference_from_float64_float32": float(np.abs(got - exact).max()),
        "huggingface_largest_difference_from_float64_float32": float(np.abs(expected - exact).max()),
    }


def _our_scores(ours: GenoMoEModel, pairs: Sequence[Pair], batch_tokens: int, precision: str) -> np.ndarray:
    kernels = ours.kernels
    ours.kernels = dataclasses.replace(kernels, precision=precision)  # type: ignore[arg-type]
    try:
        return PairScorer(ours, "llr", unk_id=UNK, batch_tokens=batch_tokens)(pairs)
    finally:
        ours.kernels = kernels


def _model(config: ModelConfig, device: str, dtype: torch.dtype) -> GenoMoEModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GenoMoEModel(config, device=device, dtype=dtype, kernels=KernelOptions())
    with torch.no_grad():  # our routers are float32 always: rounded, so that both sides have the same weights
        for layer in model.layers:
            assert isinstance(layer, Layer)
            layer.moe.router.weight.copy_(layer.moe.router.weight.to(dtype))
    return model.eval().requires_grad_(False)


def _model_like(model: GenoMoEModel, dtype: torch.dtype) -> GenoMoEModel:
    other = GenoMoEModel(model.config, device=model.embed.weight.device, dtype=dtype)
    other.load_state_dict(
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in model.state_dict().items()}
    )
    return other.eval().requires_grad_(False)
