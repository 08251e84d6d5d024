"""The same training by each way of computing the experts: what `genomoe bench precision` measures.

A small mixture of experts is trained on the bundled yeast chromosomes, or on other FASTA files, with expert products in
bf16, fp8 and mxfp8 (the latter two also keep what backward needs in MXFP8), each from the same few initial weights, all
on the same windows. Trainings that differ in anything drift apart, so one of each says nothing: what counts is how far
the means over the initial weights are apart beside their standard error. Every training is a process of its own, all on
the same device at the same time, so no time is taken. The default length ends before the model begins to learn the
bundled half a million bases by heart, where trajectories part and the held-out loss rises: train for longer on more.

Rows, by `kind`: "step" (training loss, the mean since the row before), "held_out" (bits per base of the species that
was left out), "summary" (both at the end of a training) and "verdict" (an 8-bit precision against bf16). Unmasked and
soft-masked bases weigh the same; ambiguous ones are no targets.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from genomoe.data.collate import weight_table
from genomoe.genome.alphabet import NucleotideTokenizer, reverse_complement
from genomoe.genome.fasta_parser import read_fasta
from genomoe.genome.sequence_files import resolve_path
from genomoe.model import GenoMoEModel, KernelOptions, ModelConfig
from genomoe.model.transformer import Layer
from genomoe.ops.grouped_mlp import select_backend
from genomoe.training.losses import NATS_PER_BIT, LossOutput, next_token_loss
from genomoe.training.optim import OptimConfig, make_optimizer, make_schedule
from genomoe.training.precision import PrecisionConfig

TRAIN = (
    "bundled:yeast/ScerR64_I_GCF_000146045.2_R64_genomic.fna.gz",
    "bundled:yeast/SmikIFO1815_1_GCF_947241705.1_Smik-IFO1815_genomic.fna.gz",
)
HELD_OUT = ("bundled:yeast/SkudIFO1802_1_GCF_947243775.1_Skud-IFO1802_genomic.fna.gz",)
MODEL = ModelConfig(
    hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_size=64, expert_size=512, num_experts=8, top_k=2,
    rope_theta=1e4,
)  # fmt: skip
SMALL = MODEL.replace(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_size=16, expert_size=32, num_experts=4
)
"""To try it on a CPU."""


class Training(NamedTuple):
    """One of the trainings that are compared."""

    precision: str
    """Of the expert products."""
    save: str
    """What the experts keep for the backward pass."""
    seed: int
    """Of the initial weights; the windows are the same for all."""


WAYS = (("bf16", "bf16"), ("fp8", "mxfp8"), ("mxfp8", "mxfp8"))
"""(precision, save)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """What is trained and how often it is written down."""

    model: ModelConfig = MODEL
    steps: int = 1000
    """Optimizer steps of each training."""
    seeds: int = 3
    """Initial weights, numbered from 1."""
    windows: int = 32
    """Windows a step."""
    context: int = 512
    """Tokens a window."""
    learning_rate: float = 1e-3
    """Peak of the warm-up and cosine schedule."""
    every: int = 20
    """Steps a row."""
    last: int = 200
    """Steps whose mean is the final training loss."""
    evaluations: int = 10
    """Held-out evaluations, evenly spread, the last one after the last step."""
    evaluation_windows: int | None = None
    """Windows of an evaluation, from the start of the held-out contigs; None: all."""
    data_seed: int = 0
    """Of the windows."""
    train: tuple[str, ...] = TRAIN
    """FASTA files, `bundled:` names included."""
    held_out: tuple[str, ...] = HELD_OUT

    def __post_init__(self) -> None:
        for name in ("steps", "seeds", "windows", "context", "every", "last", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def small(cls, steps: int, seeds: int = 3, **sources: Any) -> PrecisionOptions:
        """Seconds on a CPU: the command's every part, and figures that mean nothing."""
        return cls(model=SMALL, steps=steps, seeds=seeds, windows=4, context=64, evaluation_windows=16, **sources)

    @property
    def case(self) -> str:
        m = self.model
        genomes = "yeast" if self.train == TRAIN else ", ".join(Path(path).name.split(".")[0] for path in self.train)
        return (
            f"{genomes}: {m.num_layers} layers, d {m.hidden_size}, {m.num_experts} experts of {m.expert_size}, "
            f"top-{m.top_k}, {self.windows}x{self.context} tokens a step"
        )

    @property
    def trainings(self) -> list[Training]:
        return [Training(*way, seed) for way in WAYS for seed in range(1, self.seeds + 1)]

    def evaluation_steps(self) -> set[int]:
        return {math.ceil(self.steps * (i + 1) / self.evaluations) for i in range(self.evaluations)}


class Curve(NamedTuple):
    """What a training gave."""

    backend: str
    """The expert backend that `auto` took."""
    losses: list[float]
    """Bits per base of every step's batch, before its update."""
    held_out: dict[int, float]
    """Bits per base of the held-out species after so many steps."""


class Windows:
    """Both strands of a few genomes as tokens on the device, and windows of them as (tokens, labels, weights)."""

    def __init__(self, paths: Sequence[str], context: int, device: torch.device, *, strands: int = 2) -> None:
        tokenizer, table = NucleotideTokenizer(), weight_table(1.0)
        tokens, weights, starts, offset = [], [], [], 0
        for path in paths:
            for record in read_fasta(resolve_path(path)):
                for sequence in (record.sequence, reverse_complement(record.sequence))[:strands]:
                    tokens.append(tokenizer.encode(sequence))
                    weights.append(table[np.frombuffer(sequence, dtype=np.uint8)])
                    starts.append(np.arange(offset, offset + len(sequence) - context))
                    offset += len(sequence)
        self.tokens = torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device)
        self.weights = torch.from_numpy(np.concatenate(weights)).to(device)
        self.starts = torch.from_numpy(np.concatenate(starts))
        """Where a window of context + 1 tokens fits, int64 on the CPU."""
        self.columns = torch.arange(context + 1, device=device)

    def batch(self, starts_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, labels and weights [B, context] of the windows at `starts_B`; no window at a negative start."""
        rows_BS = starts_B.clamp_min(0)[:, None] + self.columns
        tokens_BS, weights_BS = self.tokens[rows_BS], self.weights[rows_BS]
        return tokens_BS[:, :-1], tokens_BS[:, 1:], weights_BS[:, 1:] * (starts_B >= 0)[:, None]


def train(training: Training, options: PrecisionOptions, device_name: str) -> Curve:
    """One training from beginning to end; waits for the device only at evaluations."""
    device = torch.device(device_name)
    compute = "bfloat16" if device.type == "cuda" else "float32"
    precision = PrecisionConfig(compute=compute, experts=training.precision)
    precision.check(device)
    kernels = KernelOptions(precision=training.precision, save=training.save)  # type: ignore[arg-type]
    model = GenoMoEModel(options.model.replace(max_context=options.context), device=device, kernels=kernels)
    model.init_weights(torch.Generator(device).manual_seed(training.seed))
    optim = OptimConfig(learning_rate=options.learning_rate)
    optimizer = make_optimizer(model.named_parameters(), optim)
    schedule = make_schedule(optimizer, options.steps, optim)
    corpus = Windows(options.train, options.context, device)
    held_out = Windows(options.held_out, options.context, device, strands=1)
    generator = torch.Generator().manual_seed(options.data_seed)
    picks = torch.randint(len(corpus.starts), (options.steps, options.windows), generator=generator)
    starts = corpus.starts[picks].to(device)
    evaluation_steps, config = options.evaluation_steps(), options.model
    bits = torch.zeros(options.steps, device=device)
    evaluated: dict[int, float] = {}
    for step in range(options.steps):
        loss, routing = _loss(model, precision, corpus.batch(starts[step]))
        router = model.router_losses(routing)
        bits[step] = loss.loss.detach() / NATS_PER_BIT
        (loss.loss + config.aux_loss_coef * router["balance"] + config.z_loss_coef * router["z"]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step + 1 in evaluation_steps:
            evaluated[step + 1] = _evaluate(model, precision, held_out, options)
    losses = bits.tolist()
    broken = next((step for step, value in enumerate(losses, start=1) if not math.isfinite(value)), None)
    if broken is not None:
        raise FloatingPointError(f"the loss is {losses[broken - 1]} at step {broken}")
    return Curve(_backend(model, compute), losses, evaluated)


def _loss(model: GenoMoEModel, precision: PrecisionConfig, batch: tuple[Tensor, ...]) -> tuple[LossOutput, Any]:
    tokens, labels, weights = batch
    with precision.autocast(tokens.device):
        output = model(tokens, compute_logits=False)
    return next_token_loss(output.hidden, model.lm_head.weight, labels, weights), output.routing


@torch.no_grad()
def _evaluate(model: GenoMoEModel, precision: PrecisionConfig, held_out: Windows, options: PrecisionOptions) -> float:
    """Bits per base over windows side by side; the last one, if it isn't full, is left out."""
    starts = held_out.starts[:: options.context][: options.evaluation_windows]
    absent = starts.new_full((-len(starts) % options.windows,), -1)  # batches of one size
    batches = torch.cat([starts, absent]).to(held_out.tokens.device).split(options.windows)
    sums = [_loss(model, precision, held_out.batch(part))[0] for part in batches]
    nats, count = sum(one.nats_sum for one in sums), sum(one.tokens for one in sums)
    return float(nats / count) / NATS_PER_BIT


def _backend(model: GenoMoEModel, compute: str) -> str:
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    experts = layer.moe.experts
    dtype = getattr(torch, compute)
    x_TD = torch.empty(1, model.config.hidden_size, device=experts.w_up.device, dtype=dtype)
    kernels = model.kernels
    return select_backend(x_TD, experts.w_up.to(dtype), precision=kernels.precision, save=kernels.save).name


def run_trainings(
    options: PrecisionOptions, *, device: str, report: Callable[[Training, str | None], None]
) -> list[dict[str, Any]]:
    """All trainings, each in a process of its own, at the same time on the same device.

    Args:
        report: called as a training ends, with the reason if it failed.

    Returns:
        The rows this module describes; a training that failed is a row with `error`.
    """
    curves: dict[Training, Curve] = {}
    errors: dict[Training, str] = {}
    spawn = multiprocessing.get_context("spawn")
    count = len(options.trainings)
    with ProcessPoolExecutor(count, mp_context=spawn, initializer=_share_cores, initargs=(count,)) as pool:
        futures = {pool.submit(train, training, options, device): training for training in options.trainings}
        for future in as_completed(futures):
            training = futures[future]
            try:
                curves[training] = future.result()
            except Exception as error:
                # a backend that cannot run here, out of memory, a loss that diverged: said in the row
                errors[training] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            report(training, errors.get(training))
    return [*_curve_rows(options, curves, errors), *_verdicts(options, curves)]


def _share_cores(processes: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))


def _curve_rows(
    options: PrecisionOptions, curves: dict[Training, Curve], errors: dict[Training, str]
) -> Iterator[dict[str, Any]]:
    """Rows of the kinds "step", "held_out" and "summary", training by training."""
    plain = [_means(curve.losses, options.every) for one, curve in curves.items() if one.precision == "bf16"]
    reference = {step: statistics.fmean(means[step] for means in plain) for step in plain[0]} if plain else {}
    for training in options.trainings:
        labels: dict[str, Any] = {"case": options.case, "implementation": "genomoe", **training._asdict()}
        if training in errors:
            yield {"kind": "summary", **labels, "error": errors[training]}
            continue
        curve = curves[training]
        labels["implementation"] = f"genomoe-{curve.backend}"
        for step, loss in _means(curve.losses, options.every).items():
            row = {"kind": "step", **labels, "step": step, "loss_bits_per_base": round(loss, 6)}
            if reference:
                row["difference_to_bf16"] = round(loss - reference[step], 6)
            yield row
        for step, value in curve.held_out.items():
            yield {"kind": "held_out", **labels, "step": step, "held_out_bits_per_base": round(value, 6)}
        yield {
            "kind": "summary",
            **labels,
            "step": options.steps,
            "loss_bits_per_base": round(_final(curve, options), 6),
            "held_out_bits_per_base": round(curve.held_out[options.steps], 6),
        }


def _verdicts(options: PrecisionOptions, curves: dict[Training, Curve]) -> Iterator[dict[str, Any]]:
    """One row for each 8-bit precision: mean over seeds minus that of bf16, with its standard error.

    `difference` compares the final training losses and `held_out_difference` the last held-out bits per base; positive
    is worse than bf16. A difference within two standard errors is no evidence of one.
    """
    for precision, save in WAYS[1:]:
        ours, plain = ([curve for one, curve in curves.items() if one.precision == p] for p in (precision, "bf16"))
        if min(len(ours), len(plain)) < 2:
            continue
        row: dict[str, Any] = {
            "kind": "verdict", "case": options.case, "implementation": f"genomoe-{ours[0].backend}",
            "precision": precision, "save": save, "seeds": len(ours), "step": options.steps,
        }  # fmt: skip
        final = functools.partial(_final, options=options)
        for prefix, figure in (("", final), ("held_out_", lambda curve: curve.held_out[options.steps])):
            a, b = [figure(curve) for curve in ours], [figure(curve) for curve in plain]
            difference = statistics.fmean(a) - statistics.fmean(b)
            error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
            row[f"{prefix}difference_bits_per_base"] = round(difference, 6)
            row[f"{prefix}standard_error_bits_per_base"] = round(error, 6)
            row[f"{prefix}bf16_range_bits_per_base"] = round(max(b) - min(b), 6)
            row[f"{prefix}within_two_standard_errors"] = abs(difference) <= 2 * error
        yield row


def _means(losses: Sequence[float], every: int) -> dict[int, float]:
    """Mean of each `every` steps by the step they end at; the last may have fewer."""
    parts = {min(start + every, len(losses)): losses[start : start + every] for start in range(0, len(losses), every)}
    return {step: statistics.fmean(part) for step, part in parts.items()}


def _final(curve: Curve, options: PrecisionOptions) -> float:
    return statistics.fmean(curve.losses[-options.last :])
