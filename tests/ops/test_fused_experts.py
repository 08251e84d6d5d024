"""The fused expert layer and the reference in low precision, against float64, values and gradients.

On the CPU the kernels run in Triton's interpreter; with a GPU, on it.
"""

from __future__ import annotations

import pytest
import torch
from expert_cases import DEVICE, SIZES, TOLERANCE, assert_close, run, tensors, truth

from genomoe.ops.grouped_mlp import grouped_mlp
from genomoe.ops.grouped_mlp.reference import grouped_mlp_reference

pytest.importorskip("triton")

from genomoe.ops.grouped_mlp import launch, products_bf16, products_fp8
from genomoe.ops.grouped_mlp.layout import (
    TILE,
    expert_layout,
    expert_layout_reference,
    slot_bound,
)
from genomoe.ops.grouped_mlp.prepared import weights_prepared_once


@pytest.mark.parametrize(("precision", "save"), TOLERANCE)
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_every_precision_is_as_close_as_its_rounding_allows(backend: str, precision: str, save: str) -> None:
    leaves, index, dy = tensors(**SIZES)
    got = run(leaves, index, dy, backend=backend, precision=precision, save=save)
    assert_close(got, truth(leaves, index, dy), TOLERANCE[precision, save])


def test_products_of_other_gpus_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton's bfloat16 products do not pay, torch's grouped product is called with the same operands."""
    leaves, index, dy = tensors(**SIZES)
    monkeypatch.setattr(products_bf16, "triton_pays", lambda device: False)
    got = run(leaves, index, dy, backend="fused", precision="bf16", save="bf16")
    assert_close(got, truth(leaves, index, dy), TOLERANCE["bf16", "bf16"])


@pytest.mark.parametrize(
    ("routing", "T", "E", "K"),
    [("one expert", 70, 4, 2), ("empty expert", 40, 3, 1), ("random", 1, 4, 2), ("random", 5, 3, 3)],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_degenerate_routing(precision: str, routing: str, T: int, E: int, K: int) -> None:
    leaves, index, dy = tensors(T=T, D=64, I=64, E=E, K=K, routing=routing)
    got = run(leaves, index, dy, backend="fused", precision=precision, save="bf16")
    # few tokens: a single dot product's rounding is not averaged over many
    assert_close(got, truth(leaves, index, dy), {name: 2.5 * t for name, t in TOLERANCE[precision, "bf16"].items()})
    for expert in set(range(E)) - set(index.flatten().tolist()):
        assert not got["dw_up"][expert].any()
        assert not got["dw_down"][expert].any()


def test_no_token_at_all() -> None:
    leaves, index, dy = tensors(T=0, D=64, I=64, E=2, K=1)
    got = run(leaves, index, dy, backend="fused")
    assert got["out"].shape == (0, 64)
    assert not got["dw_up"].any()


def test_recomputing_gives_the_same_bits() -> None:
    leaves, index, dy = tensors(**SIZES)
    kept = run(leaves, index, dy, backend="fused", save="bf16")
    again = run(leaves, index, dy, backend="fused", save="recompute")
    for name in kept:
        assert torch.equal(kept[name], again[name]), name


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_a_residual_is_added_and_takes_the_gradient_as_it_is(chunk_tokens: int | None) -> None:
    leaves, index, dy = tensors(**SIZES)
    options = {"backend": "fused", "chunk_tokens": chunk_tokens}
    plain = run(leaves, index, dy, **options)
    residual = torch.randn_like(dy).requires_grad_()
    out = grouped_mlp(*leaves[:3], index, leaves[3], residual_TD=residual, **options)
    torch.testing.assert_close(out, residual + plain["out"], rtol=2**-7, atol=2**-7)  # which rounds once more
    *gradients, dresidual = torch.autograd.grad(out, [*leaves, residual], dy)
    assert torch.equal(dresidual, dy)
    for name, value in zip(("dx", "dw_up", "dw_down", "dscores"), gradients, strict=True):
        assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize(("save", "ups"), [("bf16", 1), ("mxfp8", 1), ("recompute", 0)])
def test_a_rerun_makes_what_backward_needs_and_no_output(save: str, ups: int, monkeypatch) -> None:
    leaves, index, dy = tensors(**SIZES)
    want = run(leaves, index, dy, backend="fused", save=save)
    calls: list[str] = []
    for name in ("up", "down"):
        real = getattr(products_bf16, name)
        monkeypatch.setattr(products_bf16, name, lambda *args, n=name, real=real: calls.append(n) or real(*args))
    forward = grouped_mlp(*leaves[:3], index, leaves[3], backend="fused", save=save, rerun=True)
    assert calls == ["up"] * ups
    got = torch.autograd.grad(forward, leaves, dy)
    for name, value in zip(("dx", "dw_up", "dw_down", "dscores"), got, strict=True):
        assert torch.equal(value, want[name]), name


def test_weights_are_quantised_once_in_a_scope_and_anew_after_it(monkeypatch) -> None:
    leaves, index, _ = tensors(**SIZES)
    x, w_up, w_down, scores = (leaf.detach() for leaf in leaves)
    w_up, w_down = torch.nn.Parameter(w_up), torch.nn.Parameter(w_down)
    calls: list[str] = []
    for name in ("measure", "prepare"):
        real = getattr(products_fp8, name)
        monkeypatch.setattr(products_fp8, name, lambda *args, n=name, real=real: calls.append(n) or real(*args))

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        return grouped_mlp(x, w_up, w_down, index, scores, backend="fused", precision="fp8")

    want = forward()
    assert len(calls) == 4
    with weights_prepared_once():
        assert torch.equal(forward(), want)
        assert torch.equal(forward(), want)
    assert len(calls) == 8
    with torch.no_grad():
        w_up.mul_(1.5)
    with weights_prepared_once():
        assert not torch.equal(forward(), want), "a new scope sees the new weights"


def test_without_gradients_nothing_is_kept(monkeypatch) -> None:
    leaves, index, _ = tensors(**SIZES)
    kept: list[object] = []
    real = products_bf16.up
    monkeypatch.setattr(products_bf16, "up", lambda *args: kept.append(args[-1]) or real(*args))
    with torch.no_grad():
        grouped_mlp(*leaves[:3], index, leaves[3], backend="fused", save="mxfp8")
    assert kept == [None]


@pytest.mark.parametrize("save", ["bf16", "recompute"])
def test_chunks_change_only_the_order_of_summation(save: str) -> None:
    leaves, index, dy = tensors(**SIZES)
    whole = run(leaves, index, dy, backend="fused", save=save)
    chunked = run(leaves, index, dy, backend="fused", save=save, chunk_tokens=SIZES["T"] // 2 + 3)
    for name in ("out", "dx", "dscores"):  # a row's result does not depend on the other rows
        assert torch.equal(whole[name], chunked[name]), name
    assert_close(chunked, truth(leaves, index, dy), TOLERANCE["bf16", "bf16"])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bitwise_equal_from_run_to_run(precision: str) -> None:
    leaves, index, dy = tensors(**SIZES)
    first, second = (run(leaves, index, dy, backend="fused", precision=precision, save="mxfp8") for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_e4m3_takes_gradients_of_any_magnitude() -> None:
    """Scales are per row, so a row of tiny gradients keeps its precision beside a row of huge ones."""
    leaves, index, dy = tensors(**SIZES)
    dy = dy * torch.logspace(-12, 12, dy.shape[0], device=DEVICE)[:, None].to(dy.dtype)
    got, want = run(leaves, index, dy, backend="fused", precision="fp8", save="bf16"), truth(leaves, index, dy)
    error = (got["dx"].double() - want["dx"]).norm(dim=1) / want["dx"].norm(dim=1)
    assert error.max() < 0.12


def test_fp8_is_no_worse_than_mxfp8() -> None:
    leaves, index, dy = tensors(**{**SIZES, "T": 2 * SIZES["T"]})
    want = truth(leaves, index, dy)
    errors = {}
    for precision in ("fp8", "mxfp8"):
        got = run(leaves, index, dy, backend="fused", precision=precision, save="bf16")
        errors[precision] = {n: ((v.double() - want[n]).norm() / want[n].norm()).item() for n, v in got.items()}
    for name, error in errors["fp8"].items():
        assert error < 1.1 * errors["mxfp8"][name], (name, errors)


@pytest.mark.parametrize(("T", "K", "E"), [(100, 2, 8), (1, 1, 1), (333, 8, 64), (77, 4, 5)])
def test_layout_equals_a_stable_sort(T: int, K: int, E: int) -> None:
    g = torch.Generator().manual_seed(T)
    index = torch.rand(T, E, generator=g).topk(K).indices.to(DEVICE)
    scores = torch.rand(T, K, generator=g).to(DEVICE)
    got, want = expert_layout(index, scores, E), expert_layout_reference(index, scores, E)
    for name, tensor in got._asdict().items():
        assert torch.equal(tensor, getattr(want, name)), name
    assert got.slots == slot_bound(T * K, E)
    assert int(got.ends_E[-1]) <= got.slots
    assert (got.ends_E % TILE == 0).all()


def test_spread_then_combine_is_k_times_the_input_and_the_residual() -> None:
    x = torch.randn(50, 96, device=DEVICE).bfloat16()
    index = torch.rand(50, 4, device=DEVICE).topk(3).indices
    layout = expert_layout(index, torch.ones(50, 3, device=DEVICE), 4)
    rows = launch.spread_rows(x, layout, fp8=False).values_SX
    used = rows[: int(layout.ends_E[-1])]
    padding = layout.token_S[: used.shape[0]] < 0
    assert not used[padding].any()
    out = torch.full_like(x, torch.nan)
    launch.combine_rows(rows, layout, out=out)
    torch.testing.assert_close(out, (3 * x.float()).bfloat16(), rtol=2**-8, atol=0)
    residual = torch.randn_like(x)
    launch.combine_rows(rows, layout, residual=residual, out=out)
    assert torch.equal(out, (3 * x.float() + residual.float()).bfloat16()), "rounded once"


@pytest.mark.parametrize("save", ["bf16", "mxfp8"])
def test_e4m3_gradients_of_swiglu_are_the_plain_ones_rounded(save) -> None:
    """As rows, transposed and in their scales, against the bfloat16 pass."""
    E, I = 3, 160
    g = torch.Generator().manual_seed(0)
    layout = expert_layout(
        torch.randint(E, (90, 2), generator=g).to(DEVICE), torch.rand(90, 2, generator=g).to(DEVICE), E
    )
    used = int(layout.ends_E[-1])
    h = torch.randn(layout.slots, 2, I, generator=g).bfloat16().to(DEVICE)
    da = torch.randn(layout.slots, I, generator=g).bfloat16().to(DEVICE)
    x_scale, dy_scale = (2.0 ** torch.randint(-9, 9, (n,), generator=g).to(DEVICE) for n in (90, layout.slots))
    saved = launch.swiglu_rows(h, layout, fp8=True, save=save)[1]._replace(x_scale_T=x_scale)
    dh, a, dscore = launch.swiglu_backward_rows(da, saved, layout)
    largest_NS = da.float().abs().unflatten(1, (5, -1)).amax(2).t().contiguous()
    got = launch.swiglu_backward_e4m3(da, largest_NS, saved, dy_scale, layout)

    rows = got.dh.values_SX[:used]
    dh8, a8 = (tiles[: used // TILE].transpose(1, 2).reshape(used, -1) for tiles in (got.dh_MCB, got.a_MCB))
    assert torch.equal(dh8.view(torch.uint8), rows.view(torch.uint8))
    for values, scale, want in ((rows, got.dh.scale_S, dh), (a8, got.a_scale_S, a)):
        exact, unit = want[:used].float(), scale[:used, None]
        error = (values.float() * unit - exact).abs()
        assert (error <= exact.abs() * 2**-4 * 1.07 + unit * 2**-10).all()  # half a step of e4m3, after bfloat16's
        assert (values.float().abs() < 448).all()  # nothing saturates
    torch.testing.assert_close(got.dscore_S[:used], dscore[:used], rtol=1e-4, atol=1e-4)

    token = layout.token_S[:used]
    x_scale_S = torch.where(token >= 0, x_scale[token.clamp(min=0).long()], 0.0)
    expert = layout.tile_expert_M.repeat_interleave(TILE)[:used].long()
    for unit_E, product in (
        (got.down_unit_E, dy_scale[:used] * got.a_scale_S[:used]),
        (got.up_unit_E, x_scale_S * got.dh.scale_S[:used]),
    ):
        assert torch.equal(unit_E, torch.zeros(E, device=DEVICE).scatter_reduce(0, expert, product, "amax"))


def test_the_reference_rounds_through_the_format_it_names() -> None:
    leaves, index, _ = tensors(T=40, D=64, I=96, E=3, K=2)
    exact = grouped_mlp_reference(*(leaf.double() for leaf in leaves[:3]), index, leaves[3].double())
    for precision in ("fp8", "mxfp8"):
        out = grouped_mlp_reference(*leaves[:3], index, leaves[3], precision=precision)
        error = ((out.double() - exact).norm() / exact.norm()).item()
        assert 0.02 < error < 0.1, (precision, error)


def test_backends_say_why_they_cannot() -> None:
    leaves, index, _ = tensors(T=4, D=64, I=48, E=3, K=1)
    with pytest.raises(ValueError, match="multiples of 32, not 64 and 48"):
        grouped_mlp(*leaves[:3], index, leaves[3], backend="fused")
    with pytest.raises(ValueError, match=r"te needs an NVIDIA GPU|te needs Transformer Engine|te with"):
        grouped_mlp(*leaves[:3], index, leaves[3], backend="te", precision="mxfp8")
    with pytest.raises(ValueError, match="Transformer Engine's alone"):
        grouped_mlp(*leaves[:3], index, leaves[3], backend="reference", precision="nvfp4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_transients_do_not_grow_with_the_tokens_when_chunked(precision: str) -> None:
    peaks = []
    for T in (16384, 65536):
        leaves, index, dy = tensors(T=T, D=512, I=1024, E=8, K=2)
        options = {"backend": "fused", "precision": precision, "save": "recompute", "chunk_tokens": 4096}
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = grouped_mlp(*leaves[:3], index, leaves[3], **options)
            gradients = torch.autograd.grad(out, leaves, dy)
            torch.cuda.synchronize()
            # out, dx and dscores are results, not transients
            results = out.nbytes + gradients[0].nbytes + gradients[3].nbytes
            peak = torch.cuda.max_memory_allocated() - before - results
            del out, gradients
        peaks.append(peak)
    assert peaks[1] < 1.05 * peaks[0], peaks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_transformer_engine_agrees(precision: str) -> None:
    pytest.importorskip("transformer_engine")
    leaves, index, dy = tensors(T=2000, D=256, I=512, E=4, K=2)
    got = run(leaves, index, dy, backend="te", precision=precision)
    loose = {name: 1.2 * t for name, t in TOLERANCE[precision, "bf16"].items()}  # its scales are per tensor
    assert_close(got, truth(leaves, index, dy), loose)


@pytest.mark.parametrize("rows", [1, 3])
def test_te_interleaving_is_undone(rows: int) -> None:
    from genomoe.ops.grouped_mlp.te import deinterleave, interleave

    w = torch.arange(2 * 128 * rows, dtype=torch.float32).view(2, 128, rows)
    mixed = interleave(w)
    assert torch.equal(mixed[:, 32:64], w[:, 64:96])  # the second 32 rows are up's first
    assert torch.equal(deinterleave(mixed), w)
