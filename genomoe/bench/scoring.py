"""Variants per second of our scoring beside a well-batched Hugging Face loop: same weights, windows and
scores.

The loop runs every window whole through `MixtralForCausalLM` in batches of as many tokens as ours, in the
faster of its expert implementations, under inference mode with SDPA, whose kernel PyTorch chooses by its
defaults, and sums float32 log-softmax. It comes in two forms: a REF and an ALT window for every variant, and,
stronger, each distinct REF window once. Windows are prepared before the clock starts for both, so the figures
are of the model's work. On a CPU the clock is the process's own CPU time, which other processes do not disturb
(run it with one thread: OMP_NUM_THREADS=1). Every row of ours says how far the scores of both are apart, and every
row how well some of its scores follow those in float64 (`genomoe.bench.arbiter`).
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from genomoe.bench.arbiter import agreement, in_float64
from genomoe.bench.attention_operations import AttentionOperations
from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.genome.coordinates import Interval, Variant
from genomoe.inference.engine import Pair, PairScorer
from genomoe.inference.scoring import ScoringOptions, VariantScorer
from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.pretrained import export_mixtral
from genomoe.model.transformer import GenoMoEModel

__all__ = ["ScoringCase", "run_scoring", "scoring_cases"]

Row = dict[str, Any]
FORMS = ("ref-and-alt", "ref-once")
UNK = NucleotideTokenizer().unk_id
ARBITRATED = 16
"""So many pairs are also scored in float64, and on a GPU in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringCase:
    """What is scored with what."""

    name: str
    model: ModelConfig
    window: int
    window_mode: str
    scattered: int | None = None
    """So many SNVs at random places; None: every SNV of `saturated` neighbouring bases."""
    saturated: int = 0
    strands: str = "fwd"
    batch_tokens: int = 16384

    def variants(self, sequence: str) -> list[Variant]:
        random = np.random.default_rng(1)
        if self.scattered is not None:
            places = np.sort(random.integers(self.window, len(sequence) - self.window, self.scattered))
            return [Variant("bench", int(at), sequence[at], _other(sequence[at])) for at in places]
        block = self.window // 4  # the middle of a block, whose suffixes are as long as those of the whole on average
        start = len(sequence) // 2 // block * block + (block - self.saturated) // 2
        return [
            Variant("bench", at, sequence[at], alt)
            for at in range(start, start + self.saturated)
            for alt in "ACGT"
            if alt != sequence[at]
        ]


class _Random:
    """A contig of random bases."""

    def __init__(self, length: int):
        self.sequence = "".join(np.random.default_rng(0).choice(list("ACGT"), length))
        self.contigs = {"bench": length}

    def fetch(self, interval: Interval, pad: bool = False) -> bytes:
        return self.sequence[interval.start : interval.end].encode()


def scoring_cases(device: str) -> list[ScoringCase]:
    """Scattered and saturated SNVs at a size fit for the device."""
    if device == "cpu":
        model = ModelConfig(
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_size=32,
            expert_size=256,
            num_experts=8,
            top_k=2,
            max_context=1024,
        )
        common: dict[str, Any] = {"model": model, "window": 512}
        return [
            ScoringCase(name="scattered-centred", window_mode="centred", scattered=24, **common),
            ScoringCase(
                name="scattered-centred-both-strands",
                window_mode="centred",
                scattered=8,
                strands="both",
                **common,
            ),
            ScoringCase(name="saturation-block", window_mode="block", saturated=20, **common),
        ]
    model = ModelConfig.preset("genos-1.2b")
    common = {"model": dataclasses.replace(model, vocab_size=16), "window": 8192, "batch_tokens": 262144}
    return [
        ScoringCase(name="scattered-centred", window_mode="centred", scattered=64, **common),
        ScoringCase(name="saturation-block", window_mode="block", saturated=24, **common),
    ]


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
        loop = _HuggingFaceLoop(ours, device, dtype)
        measured = [_run_case(case, ours, loop, device, repeats, precisions, deadline, add) for case in alike]
        for left, case in zip(range(len(measured), 0, -1), measured, strict=True):
            _judge(case, ours, loop, time.monotonic() + (deadline - time.monotonic()) / left)
            if report is not None:
                report(rows)
        del ours, loop
        _free(device)
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
    loop: _HuggingFaceLoop,
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
    seconds, scores, errors = _interleaved(runs, repeats, device, deadline)
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


def _judge(case: _Measured, ours: GenoMoEModel, loop: _HuggingFaceLoop, deadline: float) -> None:
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
        _free(device)
        expected = loop.float32_scores([case.pairs[index] for index in few])
        _free(device)
        scorer = PairScorer(_model_like(ours, torch.float32), "llr", unk_id=UNK, batch_tokens=65536)
        got = scorer([case.pairs[index] for index in few])
        del scorer
    except (RuntimeError, ValueError) as error:
        case.rows[case.ours]["arbiter_error"] = _in_short(error)
        return
    finally:
        _free(device)
    case.rows[case.ours] |= {
        "largest_score_difference_float32": float(np.abs(got - expected).max()),
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


def _interleaved(
    runs: dict[str, Callable[[], np.ndarray]], repeats: int, device: str, deadline: float
) -> tuple[dict[str, float], dict[str, np.ndarray], dict[str, str]]:
    """Least seconds and the scores of each run, or why there are none; every run once to warm up, then in
    turn.

    In turn, so that whatever else the machine does meets all of them alike.
    """
    seconds: dict[str, float] = {}
    scores: dict[str, np.ndarray] = {}
    errors: dict[str, str] = {}
    clock = time.process_time if device == "cpu" else time.perf_counter
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if name in errors or (time.monotonic() > deadline and name in seconds):
                continue
            if time.monotonic() > deadline:
                errors[name] = "not run: the time budget was spent"
                continue
            try:
                _wait(device)
                start = clock()
                scores[name] = run()
                _wait(device)
                elapsed = clock() - start
            except (RuntimeError, ValueError) as error:
                errors[name] = _in_short(error)
                continue
            if turn:
                seconds[name] = min(elapsed, seconds.get(name, elapsed))
    for name in runs:
        if name not in seconds and name not in errors:
            errors[name] = "not run: the time budget was spent"
    return seconds, scores, errors


def case_pairs(case: ScoringCase, model: GenoMoEModel) -> list[Pair]:
    """What both sides score, tokenised."""
    reference = _Random(max(64 * case.window, 65536))
    options = ScoringOptions(window=case.window, window_mode=case.window_mode, strands=case.strands)  # type: ignore[arg-type]
    scorer = VariantScorer(model, NucleotideTokenizer(), reference, options)
    variants = case.variants(reference.sequence)
    return [
        scorer.pair(variant, strand) for strand in ("+-" if case.strands == "both" else "+") for variant in variants
    ]


class _HuggingFaceLoop:
    """`MixtralForCausalLM` with a model's weights, scoring whole windows in batches."""

    def __init__(self, model: GenoMoEModel, device: str, dtype: torch.dtype):
        import transformers

        with tempfile.TemporaryDirectory() as folder:
            export_mixtral(model, NucleotideTokenizer().to_dict(), f"{folder}/mixtral")
            self.models = {
                name: transformers.MixtralForCausalLM.from_pretrained(
                    f"{folder}/mixtral", dtype=dtype, attn_implementation="sdpa", experts_implementation=name
                )
                .to(device)
                .eval()
                for name in ("grouped_mm", "eager")
            }
        self.choice: str | None = None
        self.attention = ""
        """The attention operations that it runs."""

    def choose_experts(self, pairs: Sequence[Pair], batch_tokens: int, device: str) -> str:
        """The expert implementation that is faster on half a batch; the other is dropped."""
        if self.choice is None:
            few = pairs[: max(1, batch_tokens // len(pairs[0].ref) // 4)]
            runs = {name: partial(self._scores, model, few, batch_tokens, False) for name, model in self.models.items()}
            seconds, _, _ = _interleaved(runs, 2, device, float("inf"))
            self.choice = min(seconds, key=lambda name: seconds[name])
            self.models = {self.choice: self.models[self.choice]}
            _free(device)
            with AttentionOperations() as attention:
                self._scores(self.models[self.choice], few[:1], batch_tokens, False)
            self.attention = ", ".join(sorted(attention.names))
        return self.choice

    def scores(self, pairs: Sequence[Pair], batch_tokens: int, *, ref_once: bool) -> np.ndarray:
        """ALT minus REF log-likelihoods of whole windows."""
        return self._scores(self.chosen, pairs, batch_tokens, ref_once)

    def float64_scores(self, pairs: Sequence[Pair], deadline: float) -> np.ndarray:
        """The scores of as many pairs as there is time for, with every step in float64."""
        model = in_float64(self.chosen)
        known: dict[bytes, float] = {}
        scores = []
        for pair in pairs:
            if time.monotonic() > deadline:
                break
            for window in (pair.ref, pair.alt):  # one at a time: all its attention scores exist at once
                if window.tobytes() not in known:
                    known[window.tobytes()] = float(_log_likelihoods(model, np.stack([window]))[0])
            scores.append(known[pair.alt.tobytes()] - known[pair.ref.tobytes()])
        return np.array(scores)

    def float32_scores(self, pairs: Sequence[Pair]) -> np.ndarray:
        """The scores of a copy that computes in float32."""
        model = copy.deepcopy(self.chosen).float()
        model.set_experts_implementation("eager")  # its grouped product is of bfloat16 only
        return self._scores(model, pairs, 32768, False)

    @property
    def chosen(self) -> Any:
        """The model with the faster experts."""
        assert self.choice is not None, "choose_experts comes first"
        return self.models[self.choice]

    def _scores(self, model: Any, pairs: Sequence[Pair], batch_tokens: int, ref_once: bool) -> np.ndarray:
        windows = [pair.alt for pair in pairs]
        place: dict[bytes, int] = {}
        ref_at = []
        for index, pair in enumerate(pairs):
            key = pair.ref.tobytes() if ref_once else str(index).encode()
            if key not in place:
                place[key] = len(windows)
                windows.append(pair.ref)
            ref_at.append(place[key])
        size = max(1, batch_tokens // len(windows[0]))
        batches = [np.stack(windows[start : start + size]) for start in range(0, len(windows), size)]
        likelihood = torch.cat([_log_likelihoods(model, batch) for batch in batches]).cpu().numpy()
        return likelihood[: len(pairs)] - likelihood[ref_at]


@torch.inference_mode()
def _log_likelihoods(model: Any, windows: np.ndarray) -> torch.Tensor:
    """log p of whole windows [B, L], summed in float64 over logits' softmax in float32, or float64 for such a model."""
    ids = torch.from_numpy(windows).to(model.device).long()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits.to(wide), dim=-1).gather(-1, ids[:, 1:, None])[..., 0].double().sum(1)


def _model(config: ModelConfig, device: str, dtype: torch.dtype) -> GenoMoEModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GenoMoEModel(config, device=device, dtype=dtype, kernels=KernelOptions())
    with torch.no_grad():  # our routers are float32 always: rounded, so that both sides have the same weights
        for layer in model.layers:
            layer.moe.router.weight.copy_(layer.moe.router.weight.to(dtype))
    return model.eval().requires_grad_(False)


def _model_like(model: GenoMoEModel, dtype: torch.dtype) -> GenoMoEModel:
    other = GenoMoEModel(model.config, device=model.embed.weight.device, dtype=dtype)
    other.load_state_dict(
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in model.state_dict().items()}
    )
    return other.eval().requires_grad_(False)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _free(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _other(base: str) -> str:
    return "ACGT"["ACGT".index(base) - 1]
