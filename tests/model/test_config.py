"""Configurations check themselves, count themselves and survive a dict."""

from __future__ import annotations

import json

import pytest

from genomoe.model import GenoMoEModel, ModelConfig
from genomoe.model.config import PRESETS, mean_visible_keys

TINY = ModelConfig.preset("tiny", hidden_size=32, num_layers=3, expert_size=48, head_size=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, "top_k=9 is greater than model.num_experts=8"),
        ({"num_heads": 3}, "not a multiple of model.num_kv_heads"),
        ({"head_size": 7}, "odd"),
        ({"hidden_size": 0}, "hidden_size must be a whole number of at least 1, got 0"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_experts": 2.5}, "num_experts"),
        ({"aux_loss_coef": -0.1}, "aux_loss_coef"),
        ({"z_loss_coef": float("nan")}, "z_loss_coef"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"router_scores": "tanh"}, "router_scores"),
        ({"window": 0}, "window"),
        ({"global_every": 4}, "global_every is set but model.window is not"),
        ({"hiden_size": 4}, "did you mean model.hidden_size"),
        (
            {
                "max_context": 9000,
                "rope_scaling": {"kind": "yarn", "factor": 4, "original_max_context": 2048},
            },
            "raise rope_scaling.factor to at least 5",
        ),
    ],
)
def test_errors_name_the_field(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        TINY.replace(**change)


def test_missing_fields_and_unknown_presets_are_named() -> None:
    with pytest.raises(ValueError, match=r"model\.num_experts"):
        ModelConfig.from_dict({"hidden_size": 8})
    with pytest.raises(ValueError, match=r"did you mean 'genos-1\.2b'"):
        ModelConfig.preset("genos-1.2")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name) -> None:
    config = ModelConfig.preset(name, rope_scaling=None)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "change",
    [{}, {"tie_embeddings": True}, {"qk_norm": True, "num_shared_experts": 2}],
    ids=["plain", "tied", "everything"],
)
def test_parameter_count_is_that_of_the_model(change) -> None:
    config = TINY.replace(**change)
    model = GenoMoEModel(config, device="meta")
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())


def test_published_sizes() -> None:
    genos = ModelConfig.preset("genos-1.2b")
    assert 1.2e9 < genos.num_parameters() < 1.3e9
    assert 0.30e9 < genos.num_active_parameters() < 0.35e9
    mixtral = ModelConfig.preset("mixtral-8x7b")
    assert mixtral.num_parameters() == pytest.approx(46.7e9, rel=1e-3)
    assert mixtral.num_active_parameters() == pytest.approx(12.9e9, rel=1e-2)


def test_flops_of_the_experts_are_18_k_d_i_per_layer() -> None:
    genos = ModelConfig.preset("genos-1.2b")
    parts = genos.flops_by_part(8192)
    assert parts["experts"] == pytest.approx(1.81e9, rel=1e-2)
    assert parts["projections"] == pytest.approx(0.23e9, rel=2e-2)
    assert genos.flops_per_token(8192) == sum(parts.values())
    assert genos.flops_per_token(1 << 20) > 20 * genos.flops_per_token(8192)


def test_visible_keys() -> None:
    for context, window in ((1, None), (7, None), (7, 3), (7, 7), (7, 9)):
        brute = sum(min(i + 1, window or context) for i in range(context)) / context
        assert mean_visible_keys(context, window) == pytest.approx(brute)


def test_global_layers() -> None:
    config = TINY.replace(num_layers=6, window=4, global_every=3)
    assert [config.layer_window(i) for i in range(6)] == [4, 4, None, 4, 4, None]
