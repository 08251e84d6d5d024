"""One MoE feed-forward layer, every implementation on the same tokens, weights and routing: `genomoe bench layer`.

A row has the time forward and forward + backward (CUDA events, median), model TFLOP/s (18 T K D I floating-point
operations), the bytes per token that live between forward and backward (less the output) and at the peak (less the
gradients), and relative errors against float64: of out, dx and dscores over the first tokens, of the weight gradients
over all tokens of the first expert. An implementation that fails becomes a row with `error`.

Axis legend: T tokens, D hidden size, E experts, K experts chosen per token, I expert width.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from genomoe.bench import sonicmoe
from genomoe.bench.device import free
from genomoe.bench.layer_peers import PEERS, Layer
from genomoe.ops.grouped_mlp import grouped_mlp


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer's sizes and how its tokens are routed."""

    name: str
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    routing: str = "balanced"
    """"balanced": experts at random; "zipf": expert e with probability ~ 1 / (1 + e); "quarter-empty": the last quarter
    of the experts gets no token."""

    @property
    def flops(self) -> int:
        return 18 * self.tokens * self.top_k * self.hidden * self.width


CASES = (
    LayerCase(name="genos-1.2b", tokens=65536, hidden=1024, width=4096, experts=8, top_k=2),
    LayerCase(name="mixtral-8x7b", tokens=16384, hidden=4096, width=14336, experts=8, top_k=2),
    LayerCase(name="olmoe", tokens=32768, hidden=2048, width=1024, experts=64, top_k=8),
    LayerCase(name="fine-64x8", tokens=65536, hidden=1024, width=512, experts=64, top_k=8),
    LayerCase(name="genos-10b", tokens=16384, hidden=4096, width=8192, experts=8, top_k=2),
    LayerCase(name="olmoe-zipf", tokens=32768, hidden=2048, width=1024, experts=64, top_k=8, routing="zipf"),
    LayerCase(
        name="olmoe-quarter-empty", tokens=32768, hidden=2048, width=1024, experts=64, top_k=8, routing="quarter-empty"
    ),
)
OURS = (
    ("fused", "bf16", "mxfp8", None), ("fused", "fp8", "mxfp8", None), ("fused", "bf16", "bf16", None),
    ("quack", "bf16", "recompute", None), ("quack", "fp8", "recompute", None), ("fused", "fp8", "recompute", 8192),
    ("fused", "mxfp8", "mxfp8", None), ("grouped_mm", "bf16", "bf16", None), ("te", "bf16", "bf16", None),
    ("te", "fp8", "bf16", None),
)  # fmt: skip
"""(backend, precision, save, chunk_tokens), after the two closest rivals."""
CHECKED_TOKENS = 256
SLEEP_CYCLES = 10_000_000


@dataclasses.dataclass(frozen=True)
class Tensors:
    """Inputs of a case, and the float64 truth."""

    x: Tensor
    w_up: Tensor
    w_down: Tensor
    index: Tensor
    scores: Tensor
    dy: Tensor
    truth: dict[str, Tensor]


def make_tensors(case: LayerCase, device: torch.device, seed: int = 0) -> Tensors:
    """Random tokens and weights (unit-variance products) and the case's routing."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=device, generator=generator) * scale).bfloat16()

    T, D, I, E, K = case.tokens, case.hidden, case.width, case.experts, case.top_k
    x, dy = normal(T, D), normal(T, D)
    w_up, w_down = normal(E, 2 * I, D, scale=D**-0.5), normal(E, D, I, scale=I**-0.5)
    logits = torch.randn(T, E, device=device, generator=generator)
    if case.routing == "zipf":
        gumbel = -torch.log(-torch.log(torch.rand(T, E, device=device, generator=generator)))
        logits = gumbel - torch.log(1.0 + torch.arange(E, device=device))
    if case.routing == "quarter-empty":
        logits[:, E - E // 4 :] = -torch.inf
    value, index = torch.topk(logits.softmax(-1), K)
    scores = value / value.sum(-1, keepdim=True)
    return Tensors(x, w_up, w_down, index, scores, dy, float64_truth(x, w_up, w_down, index, scores, dy))


def float64_truth(
    x: Tensor, w_up: Tensor, w_down: Tensor, index: Tensor, scores: Tensor, dy: Tensor
) -> dict[str, Tensor]:
    """out, dx and dscores of the first tokens, weight gradients of expert 0."""
    few = min(CHECKED_TOKENS, x.shape[0])
    x_few, scores_few = x[:few].double().requires_grad_(), scores[:few].double().requires_grad_()
    out = torch.zeros(few, x.shape[1], device=x.device, dtype=torch.float64)
    for expert in index[:few].unique().tolist():
        token, choice = torch.where(index[:few] == expert)
        gate, up = (x_few[token] @ w_up[expert].double().t()).chunk(2, -1)
        y = (F.silu(gate) * up) @ w_down[expert].double().t()
        out = out.index_add(0, token, y * scores_few[token, choice, None])
    dx, dscores = torch.autograd.grad(out, (x_few, scores_few), dy[:few].double())
    token, choice = torch.where(index == 0)
    up_0, down_0 = w_up[0].double().requires_grad_(), w_down[0].double().requires_grad_()
    gate, up = (x[token].double() @ up_0.t()).chunk(2, -1)
    y = ((F.silu(gate) * up) * scores[token, choice, None].double()) @ down_0.t()
    dw_up, dw_down = torch.autograd.grad(y, (up_0, down_0), dy[token].double())
    return {"out": out.detach(), "dx": dx, "dw_up": dw_up, "dw_down": dw_down, "dscores": dscores}


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def relative_errors(
    truth: dict[str, Tensor], out: Tensor, x: Tensor, scores: Tensor, weights: Sequence[Tensor]
) -> dict[str, float]:
    """Frobenius norms. Weight gradients are compared only where the implementation has them stacked."""
    few = truth["out"].shape[0]
    got = {"out": out[:few], "dx": _grad(x)[:few], "dscores": _grad(scores)[:few]}
    if len(weights) == 2:
        got |= {"dw_up": _grad(weights[0])[0], "dw_down": _grad(weights[1])[0]}
    errors = {}
    for name, value in got.items():
        error = (value.double() - truth[name]).norm() / truth[name].norm()
        errors[f"error_{name}"] = float(f"{error.item():.2e}")
    return errors


def measure(
    case: LayerCase,
    tensors: Tensors,
    make: Callable[[Tensor, Tensor], tuple[Layer, list[Tensor]]],
    *,
    repeats: int,
    limit_s: int,
) -> dict[str, Any]:
    """Figures of one implementation, or why there are none."""
    try:
        with time_limit(limit_s):
            return _measure(case, tensors, make, repeats)
    except Exception as error:
        # a package that is missing, an unsupported device or shape, out of memory: said in the row
        first_line = str(error).splitlines()[0] if str(error) else ""
        return {"error": f"{type(error).__name__}: {first_line}"[:300]}
    finally:
        free("cuda")


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """TimeoutError after so many seconds: some peers tune themselves for minutes. Main thread only."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _measure(case: LayerCase, tensors: Tensors, make: Callable[..., Any], repeats: int) -> dict[str, Any]:
    layer, weights = make(tensors.w_up, tensors.w_down)
    x, scores = tensors.x.detach().requires_grad_(), tensors.scores.detach().requires_grad_()
    leaves = [x, scores, *weights]

    def forward() -> Tensor:
        return layer(x, tensors.index, scores)

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    def forward_backward() -> None:
        forward().backward(tensors.dy)
        clear()

    out = forward()
    out.backward(tensors.dy)
    row: dict[str, Any] = relative_errors(tensors.truth, out.detach(), x, scores, weights)
    del out
    clear()
    row["forward_ms"] = round(median_ms(forward, repeats), 3)
    row["forward_backward_ms"] = round(median_ms(forward_backward, repeats), 3)
    row["tflops"] = round(case.flops / row["forward_backward_ms"] / 1e9, 1)

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before - out.nbytes
    out.backward(tensors.dy)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - sum(leaf.nbytes for leaf in leaves)
    row["saved_bytes_per_token"] = round(saved / case.tokens)
    row["peak_bytes_per_token"] = round(peak / case.tokens)
    return row


def median_ms(run: Callable[[], object], repeats: int, warmups: int = 3) -> float:
    """Median of CUDA event times; the device first waits 5 ms, so that the host runs ahead of it as in training."""
    for _ in range(warmups):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def ours(backend: str, precision: str, save: str, chunk_tokens: int | None) -> Callable[..., Any]:
    """Our layer as a peer."""

    def make(w_up: Tensor, w_down: Tensor) -> tuple[Layer, list[Tensor]]:
        w_up, w_down = (weight.detach().requires_grad_() for weight in (w_up, w_down))

        def layer(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
            return grouped_mlp(
                x, w_up, w_down, index, scores,
                backend=backend, precision=precision, save=save, chunk_tokens=chunk_tokens,  # type: ignore[arg-type]
            )  # fmt: skip

        return layer, [w_up, w_down]

    return make


def implementations() -> list[tuple[dict[str, Any], Callable[..., Any]]]:
    """What is compared: labels of the row, and how to make the layer, the closest rivals next to each other."""
    rows = [_our_row("quack", "bf16", "bf16", None), (_peer_labels("sonicmoe"), PEERS["sonicmoe"])]
    rows += [_our_row(*choices) for choices in OURS]
    return rows + [(_peer_labels(name), make) for name, make in PEERS.items() if name != "sonicmoe"]


def _our_row(backend: str, precision: str, save: str, chunk: int | None) -> tuple[dict[str, Any], Callable[..., Any]]:
    labels = {"implementation": f"genomoe-{backend}", "precision": precision, "save": save, "chunk_tokens": chunk}
    return labels, ours(backend, precision, save, chunk)


def _peer_labels(name: str) -> dict[str, Any]:
    precision = "fp8" if "fp8" in name else "bf16"
    return {"implementation": name, "precision": precision, "save": "its own", "chunk_tokens": None}


def run_layers(
    *,
    only_cases: Sequence[str] = (),
    only: Sequence[str] = (),
    repeats: int = 7,
    limit_s: int = 120,
    prepare: Callable[[str], None] | None = None,
    report: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Measure every implementation on every case and call ``report`` with all rows so far after each.

    Args:
        only_cases: shell patterns of case names.
        only: shell patterns of implementation/precision/save.
        repeats: timed runs, after three warm-ups.
        limit_s: seconds an implementation may take for a case, compilation included.
        prepare: told how SonicMoE's compilations went, which then come before all measurements; None: they don't.
    """
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    cases = [case for case in CASES if not only_cases or any(fnmatch.fnmatch(case.name, p) for p in only_cases)]
    if cases and prepare is not None:
        sonicmoe.prepare((sonicmoe.Shape(c.hidden, c.width, c.experts, c.top_k) for c in cases), prepare)
    for case in cases:
        tensors = make_tensors(case, device)
        for labels, make in implementations():
            name = f"{labels['implementation']}/{labels['precision']}/{labels['save']}"
            if only and not any(fnmatch.fnmatch(name, pattern) for pattern in only):
                continue
            started = time.perf_counter()
            figures = measure(case, tensors, make, repeats=repeats, limit_s=limit_s)
            seconds = round(time.perf_counter() - started, 1)
            rows.append({"case": case.name, **labels, **figures, "wall_s": seconds})
            report(rows)
        del tensors
    if not rows:
        raise ValueError(f"no case matches; cases: {', '.join(case.name for case in CASES)}")
    return rows
