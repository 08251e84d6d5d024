"""Fused kernels equal their plain twins, values and gradients, over odd sizes (in Triton's interpreter on the CPU)."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from genomoe.ops.norm import add_rms_norm
from genomoe.ops.recipe import get_recipe
from genomoe.ops.rope import apply_rope_qkv, rope_table
from genomoe.ops.route import _SplitProduct, route, split_bfloat16

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []  # the same tests on the real thing
# relative error (Frobenius); bfloat16: one unit in the last place (2^-7), since Triton's interpreter truncates
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        error = (got[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-30)
        assert error.item() <= tolerance, (name, error.item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(("T", "D"), [(1, 16), (13, 96), (70, 128), (3, 1000), (2, 4096)])
@pytest.mark.parametrize("used", ["both", "normed", "stream"])
def test_norm(T, D, with_delta, dtype, used) -> None:
    def run(backend: str) -> dict[str, torch.Tensor]:
        leaves = {
            "x": randn(T, D, seed=0, dtype=dtype).requires_grad_(),
            "weight": (1 + 0.1 * randn(D, seed=1, dtype=dtype)).detach().requires_grad_(),
        }
        delta = None
        if with_delta:
            delta = leaves["delta"] = randn(T, D, seed=2, dtype=dtype).requires_grad_()
        stream, y = add_rms_norm(leaves["x"], delta, leaves["weight"], 1e-5, backend=backend)
        assert torch.equal(get_recipe(y)(), y)
        total = 0.0
        if used != "stream":
            total = total + (y * randn(T, D, seed=3, dtype=dtype)).sum()
        if used != "normed":
            total = total + (stream * randn(T, D, seed=4, dtype=dtype)).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {"stream": stream, "y": y} | {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}

    close(run("triton"), run("torch"), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(("T", "H", "G", "C"), [(14, 4, 2, 8), (1, 1, 1, 2), (35, 3, 1, 24), (7, 16, 8, 64)])
def test_rope(T, H, G, C, positions, dtype) -> None:
    table = rope_table(64, C, 1e4, device=DEVICE)
    position = torch.randint(0, 64, (T,), generator=torch.Generator().manual_seed(0)).to(DEVICE) if positions else None

    def run(backend: str) -> dict[str, torch.Tensor]:
        leaf = randn(T, (H + 2 * G) * C, seed=1, dtype=dtype).requires_grad_()
        q, k, v = apply_rope_qkv(leaf * 1, table, H, G, position, 7, backend=backend)
        total = sum((x * randn(*x.shape, seed=5 + i, dtype=dtype)).sum() for i, x in enumerate((q, k, v)))
        (grad,) = torch.autograd.grad(total, leaf)
        return {"q": q, "k": k, "v": v, "dqkv": grad}

    close(run("triton"), run("torch"), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("T", "E", "K"), [(1, 4, 2), (77, 8, 2), (100, 5, 5), (65, 64, 8), (9, 1, 1)])
def test_route(T, E, K, kind, bias, padding, given) -> None:
    bias_E = randn(E, seed=1) if bias else None
    valid = (torch.arange(T) % 3 != 1).to(DEVICE) if padding else None
    index = torch.rand(T, E, generator=torch.Generator().manual_seed(2)).topk(K).indices.to(DEVICE) if given else None

    def run(backend: str) -> dict[str, torch.Tensor]:
        logits = (3 * randn(T, E, seed=0)).requires_grad_()
        chosen, scores, stats = route(
            logits, K, kind=kind, bias_E=bias_E, valid_T=valid, expert_index_TK=index, backend=backend
        )
        total = (scores * randn(T, K, seed=3)).sum() + (stats.prob_sum_E * randn(E, seed=4)).sum() + 0.3 * stats.z_sum
        (grad,) = torch.autograd.grad(total, logits)
        return {"index": chosen, "scores": scores, "dlogits": grad, **stats._asdict()}

    close(run("triton"), run("torch"), 5e-6)  # a dozen float32 operations


def test_nan_logits_stay_inside_the_experts() -> None:
    index, _, _ = route(torch.full((5, 3), float("nan"), device=DEVICE), 2, backend="triton")
    assert ((index >= 0) & (index < 3)).all()


def test_router_logits_in_three_parts_are_exact() -> None:
    weight = randn(8, 64, seed=0)
    assert torch.equal(sum(part.float() for part in reversed(split_bfloat16(weight))), weight)
    x = randn(50, 64, seed=1, dtype=torch.bfloat16).requires_grad_()
    weight.requires_grad_()
    got = _SplitProduct.apply(x, weight)
    want = x.double() @ weight.double().t()
    assert ((got - want).norm() / want.norm()).item() < 3e-7
    grad = randn(50, 8, seed=2)
    dx, dw = torch.autograd.grad(got, (x, weight), grad)
    assert ((dw - grad.double().t() @ x.double()).norm() / dw.norm()).item() < 3e-7
    exact = grad.double() @ weight.double()
    assert ((dx - exact).norm() / exact.norm()).item() < 4e-3  # rounded to bfloat16


COMPILE = """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from genomoe.ops import norm_triton, rope_triton, route_triton

    def build(kernel, pointers, numbers, constants):
        signature = {**pointers, **numbers, **{name: "constexpr" for name in constants}}
        ordered = {name: signature[name] for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        out = triton.compile(ASTSource(kernel, ordered, values), target=GPUTarget("cuda", 90, 32))
        assert ".target sm_90" in out.asm["ptx"]

    bf, fp, ix = "*bf16", "*fp32", "*i64"
    for delta in (True, False):
        build(norm_triton.norm_forward_kernel,
              dict(x_ptr=bf, delta_ptr=bf, weight_ptr=bf, stream_ptr=bf, y_ptr=bf, rstd_ptr=fp),
              dict(T="i32", D="i32", eps="fp32"), dict(HAS_DELTA=delta, R=4, BLOCK_D=1024))
        build(norm_triton.norm_backward_kernel,
              dict(stream_ptr=bf, weight_ptr=bf, rstd_ptr=fp, dy_ptr=bf, dstream_ptr=bf, dx_ptr=bf, dweight_ptr=fp),
              dict(T="i32", D="i32", blocks_per_program="i32"), dict(HAS_DSTREAM=delta, R=4, BLOCK_D=1024))
    for position in (True, False):
        build(rope_triton.rope_forward_kernel,
              dict(qkv_ptr=bf, cos_ptr=fp, sin_ptr=fp, position_ptr=ix), dict(T="i32", seqlen="i32"),
              dict(HG=24, P=32, Q=2048, HAS_POSITION=position, R=2, BLOCK=1024))
        build(rope_triton.rope_backward_kernel,
              dict(dq_ptr=bf, dk_ptr=bf, dv_ptr=bf, dqkv_ptr=bf, cos_ptr=fp, sin_ptr=fp, position_ptr=ix),
              dict(T="i32", seqlen="i32"),
              dict(H=16, G=8, P=32, HAS_POSITION=position, R=4, BLOCK_Q=512, BLOCK_K=256, BLOCK_V=512))
    for E, K, sigmoid in ((8, 2, False), (64, 8, True)):
        build(route_triton.route_forward_kernel,
              dict(logits_ptr=fp, bias_ptr=fp, valid_ptr="*i1", index_ptr=ix, scores_ptr=fp, partial_ptr=fp),
              dict(T="i32"), dict(E=E, K=K, SIGMOID=sigmoid, HAS_BIAS=sigmoid, HAS_VALID=sigmoid, CHOSEN=False,
                                  R=32, BLOCK_E=E, BLOCK_K=K))
        build(route_triton.route_backward_kernel,
              dict(logits_ptr=fp, valid_ptr="*i1", index_ptr=ix, dscores_ptr=fp, dprob_sum_ptr=fp, dz_ptr=fp,
                   dlogits_ptr=fp),
              dict(T="i32"), dict(E=E, K=K, SIGMOID=sigmoid, HAS_VALID=sigmoid, R=32, BLOCK_E=E, BLOCK_K=K))
    print("compiled")
"""


def test_every_kernel_compiles_for_hopper_without_a_gpu(tmp_path, monkeypatch) -> None:
    import os

    script = tmp_path / "build.py"
    script.write_text(textwrap.dedent(COMPILE))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("compiled"), done.stderr[-3000:]
