"""What the model means: packing, padding, causality, routing statistics, the float32 router."""

from __future__ import annotations

import pytest
import torch

from genomoe.model import GenoMoEModel, KernelOptions, ModelConfig
from genomoe.model.heads import SequenceHead, pool
from genomoe.ops.route import route

CONFIG = ModelConfig(
    vocab_size=16, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, expert_size=32,
    num_experts=4, top_k=2, max_context=64,
)  # fmt: skip
EVERYTHING = CONFIG.replace(
    qk_norm=True,
    num_shared_experts=1,
    router_scores="sigmoid",
    router_bias_balancing=True,
    window=4,
    global_every=2,
)


def make(config: ModelConfig, **options) -> GenoMoEModel:
    torch.manual_seed(0)
    return GenoMoEModel(config, kernels=KernelOptions(**options)).eval()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("config", [CONFIG, EVERYTHING], ids=["mixtral", "everything"])
def test_packed_sequences_equal_separate_ones(config) -> None:
    model = make(config)
    lengths = [7, 1, 20]
    packed = tokens(sum(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    got = model(packed, cu_seqlens=cu).logits.split(lengths)
    for sequence, logits in zip(packed.split(lengths), got, strict=True):
        torch.testing.assert_close(logits, model(sequence[None]).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [CONFIG, EVERYTHING], ids=["mixtral", "everything"])
def test_the_future_does_not_change_the_past(config) -> None:
    model = make(config)
    a = tokens(1, 20)
    b = a.clone()
    b[0, 12:] = (b[0, 12:] + 1) % 16
    torch.testing.assert_close(model(a).logits[:, :12], model(b).logits[:, :12], atol=1e-6, rtol=1e-6)
    assert not torch.equal(model(a).logits[:, 12:], model(b).logits[:, 12:])


def test_hidden_states_end_before_the_final_norm() -> None:
    model = make(CONFIG)
    out = model(tokens(2, 9), output_hidden_states=True, compute_logits=False)
    assert out.logits is None
    assert len(out.hidden_states) == 3
    assert out.hidden.shape == (2, 9, 32)
    last = out.hidden_states[-1]
    torch.testing.assert_close(out.hidden, last * torch.rsqrt(last.square().mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("config", [CONFIG, EVERYTHING], ids=["softmax", "sigmoid"])
def test_padding_does_not_change_the_router_losses(config) -> None:
    model = make(config)
    short = tokens(1, 10)
    padded = torch.cat([short, torch.zeros(1, 6, dtype=torch.long)], 1)
    valid = torch.arange(16)[None] < 10
    plain, masked = model(short), model(padded, valid=valid)
    for name, value in model.router_losses(plain.routing).items():
        torch.testing.assert_close(model.router_losses(masked.routing)[name], value, atol=1e-6, rtol=1e-6, msg=name)
    assert masked.routing[0].stats.counts_E.sum() == 20
    polluted = model.router_losses(model(padded).routing)
    assert (polluted["z"] - model.router_losses(plain.routing)["z"]).abs() > 1e-8
    # and no gradient flows back from padding
    logits = torch.randn(6, 4, requires_grad=True)
    stats = route(logits, 2, valid_T=torch.arange(6) < 4)[2]
    (stats.prob_sum_E.square().sum() + stats.z_sum).backward()
    assert not logits.grad[4:].any()
    assert logits.grad[:4].any()


def test_balance_loss_is_1_when_balanced_and_e_when_collapsed() -> None:
    from genomoe.model.moe import Routing, router_losses

    even = torch.zeros(8, 4)
    index = torch.arange(8)[:, None] % 4
    stats = route(even, 1, expert_index_TK=index)[2]
    assert router_losses((Routing(index, even, stats),))["balance"].item() == pytest.approx(1.0)
    one = torch.full((8, 4), -100.0)
    one[:, 2] = 0
    stats = route(one, 1)[2]
    assert router_losses((Routing(index, even, stats),))["balance"].item() == pytest.approx(4.0)
    assert router_losses((Routing(index, even, stats),))["z"].item() == pytest.approx(0.0, abs=1e-6)


def test_losses_over_ranks_are_those_of_one_process() -> None:
    model = make(CONFIG)
    batch = tokens(4, 12)
    whole = model.router_losses(model(batch).routing)["balance"]
    halves = [model(part).routing for part in batch.split(2)]
    total = [a.stats.counts_E + b.stats.counts_E for a, b in zip(*halves, strict=True)]
    ranks = []
    for half in halves:
        layers = iter(total)
        ranks.append(model.router_losses(half, reduce=lambda counts, layers=layers: counts.copy_(next(layers))))
    torch.testing.assert_close((ranks[0]["balance"] + ranks[1]["balance"]) / 2, whole)


def test_scores_sum_to_one_and_a_bias_moves_the_choice_only() -> None:
    logits = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    bias = torch.tensor([0.0, 0.0, 0.0, 10.0])
    for kind in ("softmax", "sigmoid"):
        index, scores, _ = route(logits, 2, kind=kind, bias_E=bias)
        assert (index == 3).any(1).all()
        torch.testing.assert_close(scores.sum(1), torch.ones(50))
        unbiased = logits.softmax(-1) if kind == "softmax" else logits.sigmoid()
        ratio = unbiased.gather(1, index)
        torch.testing.assert_close(scores, ratio / ratio.sum(1, keepdim=True))


def test_bias_balancing_evens_out_the_load() -> None:
    model = make(CONFIG.replace(router_bias_balancing=True, router_bias_rate=0.02))
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.router.weight.mul_(20)

    def spread() -> float:
        counts = torch.stack([layer.stats.counts_E for layer in model(batch).routing])
        model.update_balance_bias(counts)
        return (counts.amax(1) / counts.mean(1)).mean().item()

    batch = tokens(8, 32)
    loads = [spread() for _ in range(40)]
    assert loads[-1] < loads[0]
    with pytest.raises(ValueError, match="router_bias_balancing"):
        make(CONFIG).update_balance_bias(torch.zeros(2, 4))


def test_the_router_stays_float32_under_every_conversion_and_autocast() -> None:
    model = make(EVERYTHING)
    with torch.no_grad():
        model.layers[0].moe.router.balance_bias_E.fill_(1 / 3)
    before = model.layers[0].moe.router.weight.clone()
    model.bfloat16()
    router = model.layers[0].moe.router
    assert model.layers[0].moe.experts.w_up.dtype == torch.bfloat16
    assert torch.equal(router.weight, before)
    assert router.balance_bias_E.dtype == torch.float32
    assert router.balance_bias_E[0] == torch.tensor(1 / 3)
    out = model(tokens(1, 8))
    assert out.logits.dtype == torch.bfloat16
    assert out.routing[0].scores_TK.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = make(CONFIG)(tokens(1, 8))
        assert torch.is_autocast_enabled("cpu")
    assert out.logits.dtype == torch.bfloat16
    assert out.routing[0].scores_TK.dtype == torch.float32


def test_autocast_equals_bfloat16_weights() -> None:
    model = make(CONFIG)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(tokens(2, 16)).logits
    assert torch.equal(mixed, model.bfloat16()(tokens(2, 16)).logits)


def test_initialisation_follows_the_table() -> None:
    config = CONFIG.replace(hidden_size=128, expert_size=256, num_layers=2, qk_norm=True)
    model = make(config)
    layer = model.layers[0]
    assert layer.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert layer.attention.out.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert layer.moe.experts.w_down.std().item() == pytest.approx(0.01, rel=0.05)
    for norm in (
        model.norm.weight,
        layer.attention_norm.weight,
        layer.attention.q_norm,
        layer.moe_norm.weight,
    ):
        assert (norm == 1).all()


def test_lengths_and_shapes_are_checked() -> None:
    model = make(CONFIG)
    with pytest.raises(ValueError, match=r"65 tokens is longer than model\.max_context=64"):
        model(tokens(1, 65))
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(tokens(12))
    with pytest.raises(ValueError, match="apply_policy"):
        make(CONFIG, activation="layer").train()(tokens(1, 4))


@pytest.mark.parametrize("how", ["mean", "max", "last"])
def test_padding_never_changes_a_pooled_vector(how) -> None:
    hidden = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    valid = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    want = pool(hidden[:1, :3], valid[:1, :3], how)
    hidden[0, 3:] = float("nan")
    torch.testing.assert_close(pool(hidden, valid, how)[:1], want)
    assert SequenceHead(4, 3, pooling=how, mlp_size=8)(hidden, valid).isfinite().all()
