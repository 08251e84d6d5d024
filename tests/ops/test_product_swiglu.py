"""SwiGLU in the up-projection's epilogue, where nothing is kept for backward: values, row scales and settling.

On the CPU the kernels run in Triton's interpreter; with a GPU, on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from genomoe.ops.grouped_mlp import grouped_mlp, launch, products_bf16, products_fp8
from genomoe.ops.grouped_mlp.kernels.product_swiglu import settle_kernel
from genomoe.ops.grouped_mlp.launch import HEADROOM, SAMPLE, ScaledRows
from genomoe.ops.grouped_mlp.layout import TILE, ExpertLayout, expert_layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRODUCTS: dict[str, ModuleType] = {"bf16": products_bf16, "fp8": products_fp8}

# Of a value, relative to itself: half a step of the format. Of the sums behind it, relative to the row's largest:
# float32 leaves 2**-24 for each of D terms, which cancel; Hopper's tensor cores add e4m3 products with 13 bits only,
# which are cut off anew for every 32 of D.
HALF_STEP = {"bf16": 2**-8, "fp8": 2**-4}
SUMS = {"bf16": 3e-5, "fp8": 3e-5 if DEVICE == "cpu" else 5e-3}
# Frobenius, between rounding gate and up to bfloat16 first, which the training pass does, and not: bfloat16's own
# 2**-9 a few times over; in e4m3 one value in thirty then rounds the other way, an eighth of itself
AGREEMENT = {"bf16": 6e-3, "fp8": 0.04}


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Case(NamedTuple):
    x_TD: Tensor
    w_up_E2ID: Tensor
    layout: ExpertLayout

    @property
    def used(self) -> int:
        return int(self.layout.ends_E[-1])


def case(
    I: int, *, T: int = 70, D: int = 96, E: int = 4, K: int = 2, empty: int | None = 1, seed: int = 0, spread: float = 0
) -> Case:
    """Random tokens, one of them zero; ``spread``: powers of ten over which the tokens' magnitudes reach."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g) * torch.logspace(-spread, spread, T)[:, None]
    x[T // 3] = 0
    w = torch.randn(E, 2 * I, D, generator=g) / D**0.5
    logits = torch.randn(T, E, generator=g)
    if empty is not None:
        logits[:, empty] = -torch.inf
    scores, index = logits.softmax(-1).topk(K)
    layout = expert_layout(index.to(DEVICE), scores.to(DEVICE), E)
    return Case(x.bfloat16().to(DEVICE), w.bfloat16().to(DEVICE), layout)


def up(c: Case, precision: str, *, training: bool = False) -> ScaledRows:
    products = PRODUCTS[precision]
    weight = products.prepare(c.w_up_E2ID, products.measure(c.w_up_E2ID))
    a = products.up(c.x_TD, weight, c.layout, "bf16")[0] if training else products.activation(c.x_TD, weight, c.layout)
    return a if precision == "fp8" else ScaledRows(a, None)


def values(a: ScaledRows, used: int) -> Tensor:
    rows = a.values_SX[:used].double()
    return rows if a.scales_S is None else rows * a.scale_S[:used, None].double()


def exact(c: Case, precision: str) -> Tensor:
    """silu(gate) up score in float64 of the operands as the precision rounds them, for the slots in use."""
    rows = launch.spread_rows(c.x_TD, c.layout, fp8=precision == "fp8")
    x, w = values(rows, c.used), c.w_up_E2ID.double()
    if precision == "fp8":
        weight = products_fp8.prepare(c.w_up_E2ID, products_fp8.measure(c.w_up_E2ID))
        w = weight.values_ENK.double() * weight.scale_E[:, None, None].double()
    expert = c.layout.tile_expert_M[: c.used // TILE].long()
    gate, up = torch.cat([t @ w[e].t() for t, e in zip(x.split(TILE), expert, strict=True)]).chunk(2, 1)
    return F.silu(gate) * up * c.layout.score_S[: c.used, None].double()


def exact_exponent(largest: Tensor) -> Tensor:
    """Smallest e >= -126 with largest <= 448 * 2**e."""
    mantissa, exponent = torch.frexp(largest)
    return torch.where(largest > 0, exponent - 9 + (mantissa > 0.875).int(), -126).clamp(min=-126)


def with_heavy_columns(c: Case) -> Case:
    """Some columns past those that the floor is taken from are far above it, for some tokens."""
    I = c.w_up_E2ID.shape[1] // 2
    c.w_up_E2ID[0, [SAMPLE + 7, I + SAMPLE + 7]] *= 40
    c.w_up_E2ID[2, [I - 2, 2 * I - 2]] *= 2000
    return c


def check(c: Case, precision: str) -> ScaledRows:
    """Values against float64, padding, memory past the last segment; for e4m3 the rows' powers of two."""
    a, want = up(c, precision), exact(c, precision)
    got, largest = values(a, c.used), want.abs().amax(1)
    padding = c.layout.token_S[: c.used] < 0
    assert got[padding].eq(0).all()
    bound = HALF_STEP[precision] * want.abs() + SUMS[precision] * largest[:, None]
    if precision == "fp8":
        scale = a.scale_S[: c.used].double()
        bound += 2**-10 * scale[:, None]  # half a step of subnormal numbers
        exponent = torch.log2(scale)
        assert torch.equal(exponent, exponent.round())
        assert (exponent >= exact_exponent(largest * (1 - SUMS[precision]))).all()
        assert (exponent <= exact_exponent(largest * (1 + SUMS[precision])) + HEADROOM).all()
    error = (got - want).abs()
    assert (error <= bound).all(), ((error - bound).amax().item(), (error / bound).amax().item())
    return a


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("I", [32, 96, 160, 288])
def test_values_are_exact_but_for_one_rounding(precision: str, I: int, poisoned: None) -> None:
    c = case(I)
    a = check(c, precision)
    assert c.used < c.layout.slots
    assert a.values_SX[c.used :].float().isnan().all(), "rows past the last segment are not written"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_one_token_and_every_magnitude(precision: str) -> None:
    check(case(160, T=1, empty=None), precision)
    check(case(96, spread=12), precision)


def above_floor(c: Case, a: ScaledRows) -> int:
    """Rows whose power of two is not their floor."""
    sampled = exact_exponent(exact(c, "fp8")[:, :SAMPLE].abs().amax(1))
    return int((torch.log2(a.scale_S[: c.used]) > sampled + HEADROOM).sum())


@pytest.mark.parametrize("spread", [0, 9])
def test_rows_with_values_above_their_floor_are_settled(spread: float) -> None:
    c = with_heavy_columns(case(288, spread=spread))
    assert 10 < above_floor(c, check(c, "fp8")) < c.layout.slot_TK.numel()


def test_ordinary_rows_keep_their_floor() -> None:
    c = case(288)
    a = up(c, "fp8")
    assert above_floor(c, a) == 0
    floor_of_zeros = HEADROOM - 126
    assert a.scale_S[c.layout.slot_TK[c.x_TD.shape[0] // 3].long()].log2().eq(floor_of_zeros).all()


def test_settling_changes_only_what_it_must() -> None:
    g = torch.Generator().manual_seed(0)
    S, I, tiles = 256, 288, 3
    raw = torch.randn(S, I, generator=g).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).to(DEVICE)
    exponent = torch.randint(-20, 3, (tiles, S), generator=g)
    exponent[:, ::3] = -7
    exponent[0, 5], exponent[1, 5] = -126, 100  # further apart than float32 reaches
    ends = torch.tensor([TILE, TILE], device=DEVICE)  # the second tile of slots is not in use
    scale = torch.full((S,), torch.nan, device=DEVICE)
    a = raw.clone()
    settle_kernel[(S // 32,)](
        a, exponent.to(torch.int8).to(DEVICE), ends.int(), scale, 2, S, I, tiles, ROWS=32, BN=128, BLOCK_N=4
    )
    largest = exponent.amax(0)
    change = (exponent - largest).t().repeat_interleave(128, 1)[:, :I].to(DEVICE)
    want = torch.ldexp(raw.double(), change).float().to(torch.float8_e4m3fn)
    want[TILE:] = raw[TILE:]
    assert torch.equal(a.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale[:TILE].double(), torch.exp2(largest[:TILE].double()).to(DEVICE))
    assert scale[TILE:].isnan().all()


def test_weights_of_zero_give_zeros_whatever_the_tokens() -> None:
    c = case(96, spread=12)
    c.w_up_E2ID[:, 96:] = 0
    assert values(up(c, "fp8"), c.used).eq(0).all()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_training_agrees_within_rounding_and_runs_agree_exactly(precision: str) -> None:
    c = with_heavy_columns(case(160, T=100))
    first, second, kept = up(c, precision), up(c, precision), up(c, precision, training=True)
    assert torch.equal(values(first, c.used), values(second, c.used))
    want = values(kept, c.used)
    assert (values(first, c.used) - want).norm() < AGREEMENT[precision] * want.norm()


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_only_inference_leaves_gate_and_up_unstored(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that will run again runs first without gradients, and must have the bits of its second run."""
    c = case(96)
    w_down_EDI = torch.randn(c.w_up_E2ID.shape[0], c.x_TD.shape[1], 96, device=DEVICE).bfloat16()
    index, scores = torch.zeros(c.x_TD.shape[0], 1, dtype=torch.int64), torch.ones(c.x_TD.shape[0], 1)

    def run() -> Tensor:
        operands = (c.x_TD, c.w_up_E2ID, w_down_EDI, index.to(DEVICE), scores.to(DEVICE))
        return grouped_mlp(*operands, backend="fused", precision=precision)

    with torch.no_grad():
        trained = run()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("gate and up were stored")

    monkeypatch.setattr(launch, "swiglu_rows", refuse)
    with torch.inference_mode():
        inferred = run()
    assert (inferred - trained).norm() < AGREEMENT[precision] * trained.norm()
    with torch.no_grad(), pytest.raises(AssertionError, match="stored"):
        run()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_values_at_the_size_of_a_layer(precision: str, heavy: bool) -> None:
    c = case(4096, T=4096, D=1024, E=8)
    check(with_heavy_columns(c) if heavy else c, precision)
