"""Plans: memory rises with what is kept, searches agree with the prediction, refusals name a way out."""

from __future__ import annotations

import dataclasses

import pytest

from genomoe.model import KernelOptions, ModelConfig
from genomoe.ops.attention_kernels import REACH
from genomoe.training.activation import POLICIES
from genomoe.training.optim import OptimConfig
from genomoe.training.options import ConfigError
from genomoe.training.planning import (
    DEVICES,
    GIB,
    Device,
    StepShape,
    cheapest_that_fits,
    layer_saved_bytes,
    longest_context,
    longest_context_by_policy,
    memory_at_peak,
    plan,
    require_fit,
    step_shape,
)
from genomoe.training.precision import PrecisionConfig

GENOS = ModelConfig.preset("genos-1.2b")
FUSED = KernelOptions(experts="fused", attention="sdpa")


def shape(context: int = 8192, batch: int = 4, policy: str = "none", **kernels) -> StepShape:
    options = dataclasses.replace(FUSED, activation=policy, **kernels)
    return StepShape(context=context, batch=batch, kernels=options, policy=policy)


def peak(one: StepShape) -> int:
    return sum(memory_at_peak(GENOS, one)[0].values())


def test_fixed_memory_is_weights_and_moments() -> None:
    memory, _ = memory_at_peak(GENOS, shape(context=16, batch=1))
    assert memory["weights"] == pytest.approx(2 * GENOS.num_parameters(), rel=1e-3)
    assert memory["optimizer moments"] == 2 * memory["weights"]


@pytest.mark.parametrize(("weight_bytes", "policy"), [(2, "none"), (4, "none"), (4, "layer")])
def test_weights_and_moments_are_divided_over_shards(weight_bytes: int, policy: str) -> None:
    one = dataclasses.replace(shape(policy=policy), weight_bytes=weight_bytes)
    whole, shared = (dict(memory_at_peak(GENOS, dataclasses.replace(one, shards=n))[0]) for n in (1, 8))
    for name in ("weights", "optimizer moments"):
        assert shared[name] == pytest.approx(whole[name] / 8, rel=1e-6)
    moved = shared["weights and gradients not divided"]
    layer = GENOS.num_parameters() / GENOS.num_layers
    assert 2 * layer * 2 < moved < 5 * layer * weight_bytes  # at least two gathered layers in bfloat16
    assert shared.get("weights cast for the products", 0) <= 0.1 * whole.get("weights cast for the products", 0)
    eight = dataclasses.replace(one, shards=8)
    assert sum(whole.values()) > peak(eight) > peak(dataclasses.replace(one, shards=64))


def test_a_layer_keeps_what_the_policy_says() -> None:
    D = GENOS.hidden_size
    qkv, out = 2 * 2048, 2 * 1024
    mlp = layer_saved_bytes(GENOS, shape(policy="mlp"))
    assert mlp == pytest.approx(2 * 2 * D + qkv + out, rel=0.02)  # two streams, q k v, attention's output
    assert mlp < 12_000
    assert layer_saved_bytes(GENOS, shape(policy="layer")) == 2 * D + 2
    assert layer_saved_bytes(GENOS, shape(policy="layer+mxfp8")) == D * 33 // 32 + 2
    assert layer_saved_bytes(GENOS, shape(policy="layer+offload")) == 2
    plain = layer_saved_bytes(GENOS, shape())
    assert plain > layer_saved_bytes(GENOS, shape(save="mxfp8")) > layer_saved_bytes(GENOS, shape(save="recompute"))


@pytest.mark.parametrize("policy", POLICIES)
def test_peak_rises_with_the_context_and_the_search_finds_the_edge(policy) -> None:
    one = shape(batch=1, policy=policy, chunk_tokens=32768)
    longest = longest_context(GENOS, one, 139 * GIB)
    assert longest > 100_000
    assert peak(dataclasses.replace(one, context=longest)) <= 139 * GIB
    assert peak(dataclasses.replace(one, context=longest + 256)) > 139 * GIB
    assert longest_context(GENOS, one, GIB) == 0


def test_every_policy_is_listed_with_its_longest_context() -> None:
    rows = longest_context_by_policy(GENOS, shape(), 139 * GIB)
    found = {row["policy"]: row["tokens"] for row in rows}
    assert set(found) == set(POLICIES)
    assert found["mlp"] < found["layer"] < found["layer+mxfp8"] < found["layer+mxfp8+offload"]


def test_time_follows_the_roofline() -> None:
    device = DEVICES["h200"]
    short, long = plan(GENOS, shape(), device), plan(GENOS, shape(131072, 1), device)
    assert 0.1 < short.step_seconds < 0.3
    assert long.seconds["attention"] > 10 * short.seconds["attention"]
    assert plan(GENOS, shape(policy="layer"), device).step_seconds > short.step_seconds
    assert plan(GENOS, shape(precision="fp8"), device).step_seconds < short.step_seconds
    kept, again = (plan(GENOS, shape(131072, 1, p), device).seconds["attention"] for p in ("layer+attention", "layer"))
    assert kept < again


def test_a_window_costs_its_keys_at_the_speed_of_the_flash_kernel() -> None:
    def attention(window: int | None) -> float:
        return plan(GENOS.replace(window=window), shape(131072, 1), DEVICES["h200"]).seconds["attention"]

    assert attention(131072) == attention(None)
    assert attention(131071) > 1.4 * attention(None)  # one key fewer, and the slower kernel
    assert attention(16384) < attention(None) / 2


def test_past_the_reach_of_a_launch_attention_copies_groups_of_heads() -> None:
    within = REACH // 2048  # the joint projection's columns
    kept = {"policy": "layer+attention+mxfp8+offload", "save": "recompute", "chunk_tokens": 8192}
    step = peak(shape(within + 256, 1, **kept)) - peak(shape(within, 1, **kept))
    # two groups: the halves of q, k, v, the output, its gradient, dq, dk, dv; and half a float32 sum of dq less
    assert step / within == pytest.approx((2 * (2048 + 2048 + 2048) - 4096) / 2, rel=0.02)


def test_flash4_sums_the_gradients_of_shared_heads_in_float32_and_takes_less_time() -> None:
    kept = {"policy": "layer+attention+mxfp8+offload", "save": "recompute", "chunk_tokens": 8192}
    one, other = (shape(1 << 19, 1, **kept, attention=name) for name in ("flash4", "sdpa"))
    assert peak(one) - peak(other) == 2 * 4 * GENOS.num_kv_heads * GENOS.head_size * (1 << 19)
    with_flash4, without = (plan(GENOS, step, DEVICES["h200"]).seconds["attention"] for step in (one, other))
    assert with_flash4 < without


def test_a_step_that_does_not_fit_is_refused_with_the_cheapest_way_that_does() -> None:
    device = dataclasses.replace(DEVICES["h200"], memory_bytes=24 * GIB)
    require_fit(GENOS, shape(context=8192, batch=1), device)
    with pytest.raises(
        ConfigError, match=r"4 x 8192 tokens .* activation\.policy=none activation\.save=mxfp8"
    ) as error:
        require_fit(GENOS, shape(), device)
    assert "GiB" in str(error.value)
    better = cheapest_that_fits(GENOS, shape(), device)
    assert better is not None
    assert peak(better) <= device.usable_bytes
    with pytest.raises(ConfigError, match="no activation policy makes it fit: shorten"):
        require_fit(GENOS, shape(1 << 24), device)


def test_unknown_gpus_are_named() -> None:
    assert Device.named("H200").name == "H200"
    with pytest.raises(ConfigError, match="h200"):
        Device.named("h20")


def test_8_bit_moments_take_a_quarter_of_float32_ones() -> None:
    def moments(kind: str) -> int:
        one = step_shape(
            context=8192, batch_size=4, precision=PrecisionConfig(compute="bfloat16"), kernels=KernelOptions(),
            optim=OptimConfig(moments=kind),
        )  # fmt: skip
        return memory_at_peak(GENOS, one)[0]["optimizer moments"]

    assert moments("full") == pytest.approx(8 * GENOS.num_parameters())
    assert moments("int8") == pytest.approx(2 * GENOS.num_parameters() * 65 / 64, rel=1e-6)
