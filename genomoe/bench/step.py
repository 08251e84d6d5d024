"""Whole training steps, ours and Hugging Face's, on the same card in the same run: what `genomoe bench step` measures.

A row is one case and implementation: tokens/s, MFU, peak memory, memory kept per token and layer, all of the steady
state: a step on short windows comes first, which makes the optimizer's moments and compiles the kernels, and what
offloading takes of host memory is pinned. A case that fails (out of memory, a missing library) becomes a row with
`error`, and the next one runs.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from genomoe.bench.attention_operations import AttentionOperations
from genomoe.bench.device import free, synchronize
from genomoe.model import GenoMoEModel, KernelOptions, ModelConfig
from genomoe.model.mixtral import to_mixtral_config
from genomoe.ops.loss import linear_cross_entropy
from genomoe.training.activation import apply_policy
from genomoe.training.planning import predict_peak

GIB = 2**30
SHORT = 16384
"""Tokens of a window in the step that precedes all others: above the sliding window of every case."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCase:
    """One measurement."""

    case: str
    """What is trained: the same for all implementations that are compared."""
    implementation: str
    """"hf-loop", "hf-grouped_mm" (transformers) or "genomoe-" and an expert backend."""
    model: ModelConfig
    batch: int
    context: int
    precision: str = "bf16"
    """Of the expert products."""
    save: str = "bf16"
    """What the experts keep, see `KernelOptions.save`."""
    activation: str = "none"
    """Our policy, or "layer" for Hugging Face's gradient checkpointing."""
    chunk_tokens: int | None = None
    optimizer: bool = True
    """With fused AdamW, or forward and backward only."""
    warmups: int = 2
    repeats: int = 3
    """The fastest counts."""
    seconds: float = 10.0
    """About how long it takes, for the time budget."""

    @property
    def name(self) -> str:
        return "/".join((self.case, self.implementation, self.precision, self.save, self.activation))


class Subject(Protocol):
    """A model under test."""

    def loss(self, context: int) -> Tensor:
        """One forward pass over the first `context` tokens of every window."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...


class OurSubject:
    """GenoMoE as `genomoe pretrain precision=bf16` trains it: loss with both router losses, bfloat16 weights."""

    def __init__(self, case: StepCase, device: torch.device) -> None:
        kernels = KernelOptions(
            experts=case.implementation.removeprefix("genomoe-"),
            precision=case.precision,  # type: ignore[arg-type]
            save=case.save,  # type: ignore[arg-type]
            chunk_tokens=case.chunk_tokens,
        )
        self.model = GenoMoEModel(case.model, device=device, dtype=torch.bfloat16, kernels=kernels)
        apply_policy(self.model, case.activation)
        self.model.rope(case.context)
        shape = (case.batch, case.context)
        self.tokens = torch.randint(4, 9, shape, device=device)
        self.labels = self.tokens.roll(-1, dims=1)
        self.weights = torch.ones(shape, device=device)
        self.kept_bytes = 0

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return self.model.parameters()

    def loss(self, context: int) -> Tensor:
        tokens, labels, weights = (x[:, :context] for x in (self.tokens, self.labels, self.weights))
        before = _allocated(tokens.device)
        out = self.model(tokens, compute_logits=False)
        self.kept_bytes = _allocated(tokens.device) - before
        losses = self.model.router_losses(out.routing)
        sums = linear_cross_entropy(
            out.hidden.flatten(0, 1), self.model.lm_head.weight, labels.flatten(), weights.flatten()
        )
        config = self.model.config
        mean = sums.weighted_nats / weights.sum()
        return mean + config.aux_loss_coef * losses["balance"] + config.z_loss_coef * losses["z"]


class HuggingFaceSubject:
    """transformers' MixtralForCausalLM as its users train it: `labels=`, router losses, bfloat16 weights, and SDPA with
    the kernel that PyTorch chooses by its defaults."""

    def __init__(self, case: StepCase, device: torch.device) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        how = {"hf-loop": "eager", "hf-grouped_mm": "grouped_mm"}[case.implementation]
        options: dict[str, Any] = {"output_router_logits": True, "attn_implementation": "sdpa"}
        config = MixtralConfig(**to_mixtral_config(case.model), **options)
        with torch.device(device):
            self.model = MixtralForCausalLM._from_config(config, dtype=torch.bfloat16, experts_implementation=how)
        self.model.train()
        if case.activation == "layer":
            self.model.gradient_checkpointing_enable()
        self.tokens = torch.randint(4, 9, (case.batch, case.context), device=device)
        self.kept_bytes = 0

    def parameters(self) -> Iterable[torch.nn.Parameter]:
        return self.model.parameters()

    def loss(self, context: int) -> Tensor:
        tokens = self.tokens[:, :context]
        before = _allocated(tokens.device)
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.kept_bytes = _allocated(tokens.device) - before
        return loss


def step_cases() -> list[StepCase]:
    """Genos-1.2B with AdamW, Mixtral-8x7B layers, 64 small experts."""
    genos = ModelConfig.preset("genos-1.2b", max_context=8192, aux_loss_coef=0.001)
    mixtral = ModelConfig.preset("mixtral-8x7b", num_layers=4, vocab_size=512, max_context=8192)
    fine = ModelConfig.preset("fine-64x8", vocab_size=512, max_context=8192)
    groups: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
        (
            "genos-1.2b 4x8192",
            {"model": genos, "batch": 4, "context": 8192},
            [
                {"implementation": "genomoe-quack"},
                {"implementation": "genomoe-fused"},
                {"implementation": "genomoe-fused", "precision": "fp8"},
                {"implementation": "hf-loop"},
                {"implementation": "hf-grouped_mm"},
                {"implementation": "genomoe-fused", "precision": "fp8", "save": "mxfp8"},
                {"implementation": "genomoe-fused", "save": "mxfp8"},
                {"implementation": "genomoe-fused", "activation": "mlp"},
                {"implementation": "genomoe-fused", "activation": "layer"},
                {"implementation": "genomoe-grouped_mm"},
            ],
        ),
        (
            "mixtral-8x7b 4 layers 2x8192, no optimizer",
            {"model": mixtral, "batch": 2, "context": 8192, "optimizer": False},
            [
                {"implementation": "genomoe-quack"},
                {"implementation": "genomoe-fused"},
                {"implementation": "genomoe-fused", "precision": "fp8"},
                {"implementation": "hf-loop"},
                {"implementation": "hf-grouped_mm"},
            ],
        ),
        (
            "64 experts top-8 12 layers 2x8192, no optimizer",
            {"model": fine, "batch": 2, "context": 8192, "optimizer": False},
            [
                {"implementation": "genomoe-quack"},
                {"implementation": "genomoe-fused"},
                {"implementation": "genomoe-fused", "precision": "fp8"},
                {"implementation": "hf-grouped_mm"},
                {"implementation": "hf-loop", "warmups": 1, "repeats": 2},
            ],
        ),
    ]
    return [StepCase(case=case, **shared, **one) for case, shared, ones in groups for one in ones]


def measure(case: StepCase, device: torch.device, peak_flops: float | None) -> dict[str, Any]:
    """One row; never raises for a failure of the case itself."""
    tokens = case.batch * case.context
    row: dict[str, Any] = {
        "case": case.case,
        "implementation": case.implementation,
        "precision": case.precision,
        "save": case.save,
        "activation": case.activation,
        "optimizer": case.optimizer,
        "batch": case.batch,
        "context": case.context,
        "tokens": tokens,
    }
    free(device)
    started = time.perf_counter()
    try:
        row |= _timed(case, device, tokens, peak_flops)
    except Exception as error:
        # out of memory, a backend that cannot run here, a library that is missing: said in the row
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    row["wall_s"] = round(time.perf_counter() - started, 2)
    free(device)
    return row


def _timed(case: StepCase, device: torch.device, tokens: int, peak_flops: float | None) -> dict[str, Any]:
    torch.manual_seed(0)
    ours = case.implementation.startswith("genomoe-")
    subject = OurSubject(case, device) if ours else HuggingFaceSubject(case, device)
    optimizer = None
    if case.optimizer:
        optimizer = torch.optim.AdamW(subject.parameters(), lr=1e-5, fused=True)
    with AttentionOperations() as attention:
        _step(subject, optimizer, min(case.context, SHORT))
    free(device)
    if device.type == "cuda":
        _pin_host_memory(case)
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(case.warmups + case.repeats):
        synchronize(device)
        start = time.perf_counter()
        loss = _step(subject, optimizer, case.context)
        synchronize(device)
        times.append(time.perf_counter() - start)
    seconds = min(times[case.warmups :])
    if not torch.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss.item()}")
    out: dict[str, Any] = {
        "loss": round(loss.item(), 4),
        "step_s": round(seconds, 5),
        "first_step_s": round(times[0], 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "model_tflops": round(case.model.flops_per_token(case.context) * tokens / seconds / 1e12, 1),
        "saved_bytes_per_token_layer": round(subject.kept_bytes / tokens / case.model.num_layers),
        "attention": ", ".join(sorted(attention.names)),
    }
    if peak_flops:
        out["mfu"] = round(out["model_tflops"] * 1e12 / peak_flops, 4)
    if device.type == "cuda":
        out["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / GIB, 3)
        out["reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / GIB, 3)
    if ours:
        predicted = predict_peak(
            case.model,
            batch=case.batch,
            context=case.context,
            kernels=subject.model.kernels,
            policy=case.activation,
            optimizer=case.optimizer,
        )
        out["predicted_peak_gib"] = round(predicted / GIB, 3)
    return out


def _step(subject: Subject, optimizer: torch.optim.Optimizer | None, context: int) -> Tensor:
    """One training step; its loss."""
    loss = subject.loss(context)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    for parameter in subject.parameters():
        parameter.grad = None
    return loss.detach()


def _pin_host_memory(case: StepCase) -> None:
    """Pin the host memory that offloading takes, which costs a first step a second for every few GiB."""
    if "offload" in case.activation:
        size = case.batch * case.context * case.model.hidden_size * (1 if "mxfp8" in case.activation else 2)
        pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(case.model.num_layers)]
        del pinned  # into PyTorch's cache, from which the steps take it


def run_cases(
    cases: Sequence[StepCase],
    *,
    device: torch.device | str = "cuda",
    only: Sequence[str] = (),
    time_budget: float | None = None,
    report: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Measure every case and call `report` with all rows so far after each.

    Args:
        only: shell patterns; a case runs if one matches its name (case/implementation/precision/save/activation).
        time_budget: seconds; a case that would not end in time becomes a row with `error`.
    """
    device = torch.device(device)
    started = time.perf_counter()
    chosen = [case for case in cases if not only or any(fnmatch.fnmatch(case.name, p) for p in only)]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise ValueError(f"no case matches {', '.join(only)}; cases: {names}")
    peak = measured_peak_flops(device)
    rows: list[dict[str, Any]] = []
    if peak:
        rows.append({"case": "ceiling", "implementation": "torch.mm bf16 8192^3", "tflops": round(peak / 1e12, 1)})
    for case in chosen:
        spent = time.perf_counter() - started
        if time_budget is not None and spent + case.seconds > time_budget:
            rows.append(
                {
                    "case": case.case,
                    "implementation": case.implementation,
                    "precision": case.precision,
                    "save": case.save,
                    "activation": case.activation,
                    "error": f"not run: {spent:.0f} s of the budget of {time_budget:.0f} s were spent",
                }
            )
        else:
            rows.append(measure(case, device, peak))
        report(rows)
    return rows


def measured_peak_flops(device: torch.device) -> float | None:
    """FLOP/s of a large bfloat16 product on this device now, which MFU is relative to; None on the CPU."""
    if device.type != "cuda":
        return None
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(8):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ a
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * 8192**3 / best


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
