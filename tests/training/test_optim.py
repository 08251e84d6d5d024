"""Decay groups, schedule and precision settings."""

import io
import math
import sys
from itertools import pairwise

import pytest
import torch

from genomoe.model.config import ModelConfig
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.optim import OptimConfig, decay_groups, learning_rate_factor, make_optimizer, make_schedule
from genomoe.training.options import ConfigError
from genomoe.training.precision import PrecisionConfig


def test_only_matrices_outside_embedding_and_router_are_decayed() -> None:
    model = GenoMoEModel(ModelConfig.preset("tiny", num_layers=1, qk_norm=True))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = decay_groups(model.named_parameters(), 0.1)
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0
    decayed_names = {names[id(p)] for p in decayed["params"]}  # type: ignore[attr-defined]
    kept_names = {names[id(p)] for p in kept["params"]}  # type: ignore[attr-defined]
    assert decayed_names | kept_names == set(names.values())
    assert {"layers.0.moe.experts.w_up", "layers.0.moe.experts.w_down", "lm_head.weight"} <= decayed_names
    assert {"embed.weight", "layers.0.moe.router.weight", "norm.weight"} <= kept_names
    assert not any("norm" in name for name in decayed_names)


def test_schedule_warms_up_holds_and_decays_to_its_end() -> None:
    config = OptimConfig(warmup_fraction=0.1, stable_fraction=0.2, final_fraction=0.1, schedule="linear")
    factors = [learning_rate_factor(step, 100, config) for step in range(100)]
    assert 0 < factors[0] < factors[5] < factors[9] < 1
    assert factors[10:30] == [1.0] * 20
    assert all(a > b for a, b in pairwise(factors[29:]))
    assert factors[-1] == pytest.approx(0.1)
    cosine = OptimConfig(warmup_fraction=0.0, final_fraction=0.0)
    assert learning_rate_factor(49, 100, cosine) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))
    constant = OptimConfig(schedule="constant", warmup_fraction=0.0)
    assert learning_rate_factor(99, 100, constant) == 1.0
    assert learning_rate_factor(0, 1, OptimConfig()) > 0


def test_optimizer_rate_follows_the_schedule() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    config = OptimConfig(learning_rate=0.5, warmup_fraction=0.5)
    optimizer = make_optimizer([("w", parameter)], config)
    schedule = make_schedule(optimizer, 4, config)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.5 * learning_rate_factor(step, 4, config) for step in range(4)])


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 0},
        {"learning_rate": float("nan")},
        {"weight_decay": -1},
        {"betas": (0.9, 1.0)},
        {"warmup_fraction": 1.5},
        {"warmup_fraction": 0.6, "stable_fraction": 0.6},
        {"schedule": "step"},
    ],
    ids=str,
)
def test_bad_optimizer_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        OptimConfig(**settings)  # type: ignore[arg-type]


def test_precision_settings() -> None:
    assert PrecisionConfig(compute="bfloat16").dtype == torch.float32
    with pytest.raises(ConfigError, match="compute=float32"):
        PrecisionConfig(parameters="bfloat16")
    with pytest.raises(ConfigError, match=r"precision\.exprts .* did you mean experts\?"):
        PrecisionConfig.from_config({"exprts": "fp8"}, where="precision")


def test_fp8_on_an_old_gpu_is_refused_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"A100 \(8\.0\): use precision=bf16"):
        PrecisionConfig(compute="bfloat16", experts="fp8").check(torch.device("cuda"))


def test_a_missing_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ModuleNotFoundError, match=r"genomoe\[int8\]"):
        make_optimizer([("w", torch.nn.Parameter(torch.ones(2, 2)))], OptimConfig(moments="int8"))


@pytest.mark.slow
def test_int8_moments_train_as_full_ones_and_resume_exactly() -> None:
    pytest.importorskip("torchao.optim")

    def train(moments: str, *, interrupt: bool = False) -> tuple[list[float], torch.Tensor, torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(64, 128))
        x, target = torch.randn(256, 128, generator=generator), torch.randn(64, 128, generator=generator)
        config = OptimConfig(learning_rate=0.05, weight_decay=0.0, moments=moments)
        optimizer = make_optimizer([("w", weight)], config)
        schedule = make_schedule(optimizer, 60, config)
        losses = []
        for step in range(60):
            if interrupt and step == 30:
                buffer = io.BytesIO()
                torch.save((optimizer.state_dict(), schedule.state_dict()), buffer)
                buffer.seek(0)
                states = torch.load(buffer, weights_only=True)
                optimizer = make_optimizer([("w", weight)], config)
                schedule = make_schedule(optimizer, 60, config)
                optimizer.load_state_dict(states[0])
                schedule.load_state_dict(states[1])
            loss = (x @ (weight - target).T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses, weight.detach(), optimizer

    full, _, _ = train("full")
    eight, weight, optimizer = train("int8")
    assert full[-1] < 0.2 * full[0]
    assert eight[-1] == pytest.approx(full[-1], rel=0.1)
    assert float(optimizer.param_groups[0]["lr"]) < 0.05 * 0.5
    state = next(iter(optimizer.state.values()))
    assert state["exp_avg"].codes.dtype == torch.uint8
    again, same_weight, _ = train("int8", interrupt=True)
    assert again == eight
    assert torch.equal(weight, same_weight)
