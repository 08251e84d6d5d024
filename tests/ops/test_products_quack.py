"""The fused path with QuACK's products: on Hopper the package itself, elsewhere stand-ins that take its arguments
literally.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from expert_cases import DEVICE, SIZES, TOLERANCE, assert_close, run, tensors, truth

from genomoe.ops.grouped_mlp import grouped_mlp

pytest.importorskip("triton")

from genomoe.ops.grouped_mlp import launch, launch_quack, products_quack, select
from genomoe.ops.grouped_mlp.layout import expert_layout

QUACK_MISSING = launch_quack.quack_missing

# ---- stand-ins: a contraction of groups of rows or of slots, with the package's names -------------------------------


def interleaved(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The first and second half of a dimension, alternating."""
    return torch.stack(x.chunk(2, dim), dim + 1).flatten(dim, dim + 1)


def outer_dim(matrix: torch.Tensor) -> int:
    """Which of the last two dimensions is not contiguous: the one that `concat_layout` is about."""
    assert 1 in matrix.stride()[-2:]
    return -2 if matrix.stride(-1) == 1 else -1


def grouped(A, B, starts, A_idx, concat_layout):
    """float32 rows @ B[group]^T, and one past the last row."""
    rows = A if A_idx is None else A[A_idx.long()]
    if concat_layout == ("B",):
        B = interleaved(B, B.ndim + outer_dim(B))
    bounds = starts.tolist()
    parts = [
        rows[start:end].float() @ b.float().t()
        for start, end, b in zip(bounds, bounds[1:], B, strict=False)
        if end <= len(rows)
    ]
    return torch.cat(parts), bounds[-1]


def check_tile(*, A_idx, cluster_M, cluster_N, **tile):
    assert cluster_M * cluster_N == 2
    if A_idx is not None:
        assert cluster_N == 1, "blocks that gather share columns only"
        assert (A_idx >= 0).all()


def gemm(A, B, D, C, semaphore, *, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None, concat_layout=None, **tile):
    check_tile(**tile, A_idx=A_idx)
    if cu_seqlens_m is not None:
        out, end = grouped(A, B, cu_seqlens_m, A_idx, concat_layout)
        D[:end] = out.to(D.dtype)
        return
    assert A.stride(0) == B.stride(0) == 1
    columns = A if A_idx is None else A[:, A_idx.long()]
    bounds = cu_seqlens_k.tolist()
    for d, start, end in zip(D, bounds, bounds[1:], strict=False):
        out = columns[:, start:end].float() @ B[:, start:end].float().t()
        if concat_layout == ("out",):
            dim = outer_dim(d)
            out = torch.cat([out.unflatten(dim, (-1, 2)).select(dim, half) for half in (0, 1)], dim)
        d.copy_(out)


def gemm_dgated(
    A, B, Out, PreAct, PostAct, semaphore, activation, *, colvec_scale, colvec_reduce, cu_seqlens_m, A_idx, **tile
):
    check_tile(**tile, A_idx=A_idx)
    assert activation == "swiglu"
    da, end = grouped(A, B, cu_seqlens_m, A_idx, None)
    pairs = PreAct[:end].float().unflatten(1, (-1, 2)).requires_grad_()
    with torch.enable_grad():
        a = F.silu(pairs[..., 0]) * pairs[..., 1]
        (dh,) = torch.autograd.grad(a, pairs, da * colvec_scale[:end, None])
    Out[:end] = dh.flatten(1).to(Out.dtype)
    PostAct[:end] = (a.detach() * colvec_scale[:end, None]).to(PostAct.dtype)
    share = a.detach() * da
    for column in range(colvec_reduce.shape[1]):
        width = tile["tile_N"]
        colvec_reduce[:end, column] = share[:, column * width : (column + 1) * width].sum(1)


def compiled_product(tile, *, gated, e4m3, keep, gather):
    def kernel(x, w, out, layout, taken):
        starts, rows = launch_quack._starts(layout), launch_quack._token_of_slot(layout) if gather else None
        found, end = grouped(x, w, starts, rows, ("B",) if gated else None)
        row_scale = taken[-1]
        assert (row_scale is not None) == e4m3
        assert (x.dtype == w.dtype == torch.float8_e4m3fn) == e4m3
        assert (out is not None) == keep
        if e4m3:
            found = found * row_scale[:end, None]
        if keep:
            out[:end] = found.to(out.dtype)
        if gated:
            a, score, _ = taken
            a[:end] = (F.silu(found[:, ::2]) * found[:, 1::2] * score[:end, None]).to(a.dtype)

    return kernel


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **contents: object) -> None:
        made = ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    module("quack")
    module("quack.gemm", gemm=gemm)
    module("quack.gemm_dact", gemm_dgated=gemm_dgated)
    monkeypatch.setattr(launch_quack, "compiled_product", compiled_product)
    monkeypatch.setattr(launch_quack, "quack_missing", lambda: None)


@pytest.fixture(autouse=True)
def quack_products(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cuda":
        if missing := launch_quack.quack_missing():
            pytest.skip(f"QuACK's products: {missing}")
        return
    stand_in(monkeypatch)


@pytest.fixture(params=["gathered", "copied"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether rows are gathered as they are loaded, or copied into slot order before."""
    monkeypatch.setattr(products_quack, "NARROW_EXPERTS", 1 << 20 if request.param == "gathered" else 0)
    return request.param


# ---- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("save", ["bf16", "recompute"])
@pytest.mark.parametrize("chunk_tokens", [None, SIZES["T"] // 2 + 3])
def test_values_and_gradients_are_as_close_as_rounding_allows(save: str, chunk_tokens: int | None) -> None:
    leaves, index, dy = tensors(**SIZES)
    got = run(leaves, index, dy, backend="quack", save=save, chunk_tokens=chunk_tokens)
    assert_close(got, truth(leaves, index, dy), TOLERANCE["bf16", "bf16"])


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("routing", "T", "E", "K"),
    [
        ("one expert", 70, 4, 2),
        ("empty expert", 40, 3, 1),
        ("random", 1, 4, 2),
        ("random", 5, 3, 3),
        ("random", 0, 2, 1),
    ],
)
def test_degenerate_routing(routing: str, T: int, E: int, K: int) -> None:
    leaves, index, dy = tensors(T=T, D=64, I=96, E=E, K=K, routing=routing)
    got = run(leaves, index, dy, backend="quack")
    # few tokens: a single dot product's rounding is not averaged over many
    if T:
        assert_close(got, truth(leaves, index, dy), {name: 2.5 * t for name, t in TOLERANCE["bf16", "bf16"].items()})
    for expert in set(range(E)) - set(index.flatten().tolist()):
        assert not got["dw_up"][expert].any()
        assert not got["dw_down"][expert].any()


@pytest.mark.usefixtures("rows")
def test_bitwise_equal_from_run_to_run_kept_or_recomputed() -> None:
    leaves, index, dy = tensors(**SIZES)
    first, second, again = (
        run(leaves, index, dy, backend="quack", save=save) for save in ("bf16", "bf16", "recompute")
    )
    for name in first:
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], again[name]), name


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_without_a_backward_pass_the_output_is_as_close(precision: str) -> None:
    leaves, index, dy = tensors(**SIZES)
    want = truth(leaves, index, dy)["out"]
    with torch.inference_mode():
        out = grouped_mlp(*leaves[:3], index, leaves[3], backend="quack", precision=precision)
    assert_close({"out": out}, {"out": want}, TOLERANCE[precision, "bf16"])
    whole = run(leaves, index, dy, backend="quack", precision=precision)["out"]
    error = (out.double() - whole.double()).norm() / whole.double().norm()
    assert error < (0.04 if precision == "fp8" else 4e-3), "it is training's forward pass but for one rounding"


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_its_products_run_where_it_is_named_and_nowhere_else(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, index, dy = tensors(T=20, D=64, I=64, E=3, K=2)
    launched: list[object] = []
    real = launch_quack.compiled_product
    monkeypatch.setattr(
        launch_quack, "compiled_product", lambda tile, **how: launched.append(tile) or real(tile, **how)
    )
    run(leaves, index, dy, backend="fused", precision=precision, save="recompute")
    assert not launched
    run(leaves, index, dy, backend="quack", precision=precision, save="recompute")
    assert launched


def test_whether_it_can_run_is_said_where_there_is_no_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None; import torch; from genomoe.ops.grouped_mlp import select_backend\n"
        "x, w = torch.ones(2, 64).bfloat16(), torch.ones(3, 128, 64).bfloat16()\n"
        "choice = select_backend(x, w, precision='bf16', save='bf16')\n"
        "print(choice.name, choice.others['quack'], sep=': ')"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "reference: quack needs an NVIDIA GPU\n", done.stderr[-1000:]


def test_rows_are_scaled_by_their_own_power_of_two() -> None:
    layout = expert_layout(torch.zeros(3, 1, dtype=torch.int32, device=DEVICE), torch.ones(3, 1, device=DEVICE), 1)
    a = torch.randn(layout.slots, 160, device=DEVICE).bfloat16() * torch.logspace(
        -20, 20, layout.slots, device=DEVICE
    ).bfloat16().unsqueeze(1)
    a[5] = 0
    values, scale, _ = launch.scale_rows(a, layout)
    largest = a.float().abs().amax(1)
    assert torch.equal(scale, 2.0 ** scale.log2().round())
    error = (values.float() * scale[:, None] - a.float()).abs()
    assert (error <= a.float().abs() * 2**-4 + scale[:, None] * 2**-10).all()
    full = largest > 0
    assert ((largest / scale)[full] <= 448).all()
    assert ((largest / scale)[full] > 200).all(), "no binade is left unused"


def test_an_installation_that_does_not_load_is_left_aside_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = QUACK_MISSING.__wrapped__
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert "compute capability 9.0" in missing()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert "pip install 'genomoe[quack]'" in missing()
    monkeypatch.setattr(metadata, "version", lambda name: "0.6.5")
    monkeypatch.setitem(sys.modules, "quack", None)
    assert missing().startswith("quack-kernels 0.6.5 does not load (")


def test_it_comes_first_where_it_can_run_and_says_why_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, index, _ = tensors(T=4, D=64, I=64, E=3, K=1)
    monkeypatch.setattr(select, "_not_worth_it", lambda name, *_: None if name in ("quack", "fused") else "left out")

    def choose(precision: str, save: str) -> select.Choice:
        return select.select_backend(*leaves[:2], precision=precision, save=save)

    assert choose("bf16", "bf16").name == choose("fp8", "mxfp8").name == "quack"
    for precision, why_not in (("bf16", "in bfloat16, not in MXFP8"), ("mxfp8", "bf16 and fp8 products, not mxfp8")):
        choice = choose(precision, "mxfp8")
        assert choice.name == "fused"
        assert choice.others["quack"].endswith(why_not)
    monkeypatch.setattr(launch_quack, "quack_missing", lambda: "quack-kernels is not installed")
    assert choose("bf16", "bf16").others["quack"] == "quack-kernels is not installed"
    with pytest.raises(ValueError, match="'quack' cannot run here: quack-kernels is not installed"):
        grouped_mlp(*leaves[:3], index, leaves[3], backend="quack")


@pytest.mark.skipif(importlib.util.find_spec("quack") is None, reason="quack-kernels is not installed")
def test_our_epilogues_compile_for_hopper_without_a_gpu() -> None:
    script = Path(__file__).with_name("compile_quack.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("compiled") == 6
