"""The training loop: it learns, it stops on NaN with a place, its metrics and loss are right."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from genomoe.data.collate import Batch
from genomoe.model.pretrained import from_pretrained
from genomoe.training.checkpoint import list_checkpoints
from genomoe.training.compose import compose_config
from genomoe.training.losses import next_token_loss
from genomoe.training.metrics import BitsPerBase
from genomoe.training.metrics_log import MetricsCsv
from genomoe.training.pretrain import CausalModule, NonFiniteError
from genomoe.training.run import pretrain

# ---- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 7, 64, 1000])
def test_loss_equals_the_plain_formula_in_value_and_gradient(chunk: int | None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 13, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(16, (5, 13))
    weights = torch.tensor([0.0, 0.1, 1.0])[torch.randint(3, (5, 13))]
    nats = F.cross_entropy((hidden @ weight.T).flatten(0, 1), labels.flatten(), reduction="none").view(5, 13)
    expected = (nats * weights).sum() / weights.sum()
    wanted = torch.autograd.grad(expected, [hidden, weight])
    got = next_token_loss(hidden, weight, labels, weights, chunk=chunk)
    # logits are normalised in float32 by design
    torch.testing.assert_close(got.loss.double(), expected, rtol=1e-6, atol=0)
    for name, a, b in zip(("hidden", "weight"), torch.autograd.grad(got.loss, [hidden, weight]), wanted, strict=True):
        assert (a - b).norm() < 1e-6 * b.norm(), name
    assert got.tokens == (weights > 0).sum()
    assert got.nats_sum.item() == pytest.approx(nats[weights > 0].sum().item(), rel=1e-6)


def test_loss_of_nothing_is_zero_not_nan() -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    loss = next_token_loss(hidden, torch.randn(16, 8), torch.zeros(3, dtype=torch.long), torch.zeros(3)).loss
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_bits_per_base_of_a_uniform_guess_over_four_is_two() -> None:
    metric = BitsPerBase()
    hidden, head = torch.ones(6, 1), torch.full((16, 1), -1e9)
    head[4:8] = 0.0
    labels = torch.tensor([4, 5, 6, 7, 4, 5])
    for weights in (torch.ones(6), torch.full((6,), 0.1), torch.tensor([1.0, 0, 0, 0, 0, 0])):
        metric.update(next_token_loss(hidden, head, labels, weights))
    values = metric.compute()
    assert values["bits_per_base"].item() == pytest.approx(2.0)
    assert values["bits_per_base_weighted"].item() == pytest.approx(2.0)
    assert metric.count == 13


# ---- the run -----------------------------------------------------------------------------------------------


def test_training_learns_and_the_saved_model_is_the_trained_one(tiny: tuple[str, ...], tmp_path: Path) -> None:
    result = pretrain(compose_config("pretrain", [*tiny, f"paths.run_dir={tmp_path / 'run'}"]))
    metrics = pd.read_csv(result.run.metrics_file)
    assert metrics["train/bits_per_base"].iloc[-1] < metrics["train/bits_per_base"].iloc[0]
    assert metrics["train/tokens_seen"].iloc[-1] == 30 * 4 * 64
    model, tokenizer = from_pretrained(result.run.model)
    state = torch.load(list_checkpoints(result.run.checkpoints)[-1][1], weights_only=True)["state_dict"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[f"model.{name}"]), name
    assert tokenizer is not None
    assert tokenizer["name"] == "nucleotide"
    assert "Trained on" in (result.run.model / "README.md").read_text()


def test_bf16_trains_and_keeps_float32_weights(tiny: tuple[str, ...], tmp_path: Path) -> None:
    overrides = [*tiny, "precision=bf16", "trainer.max_steps=4", f"paths.run_dir={tmp_path / 'run'}"]
    result = pretrain(compose_config("pretrain", overrides))
    model, _ = from_pretrained(result.run.model)
    assert next(model.parameters()).dtype == torch.float32


def test_accumulating_two_batches_is_one_update(tiny: tuple[str, ...], tmp_path: Path) -> None:
    overrides = [*tiny, "trainer.accumulate_grad_batches=2", "trainer.max_steps=3", f"paths.run_dir={tmp_path / 'run'}"]
    result = pretrain(compose_config("pretrain", overrides))
    metrics = pd.read_csv(result.run.metrics_file)
    assert list(metrics["step"]) == [1, 2, 3]
    assert metrics["train/tokens_seen"].iloc[-1] == 3 * 2 * 4 * 64


def test_loss_free_balancing_moves_the_biases(tiny: tuple[str, ...], tmp_path: Path) -> None:
    overrides = [*tiny, "+model.router_bias_balancing=true", "trainer.max_steps=3", f"paths.run_dir={tmp_path / 'run'}"]
    model, _ = from_pretrained(pretrain(compose_config("pretrain", overrides)).run.model)
    for layer in model.layers:
        bias_E = layer.moe.router.balance_bias_E
        assert bias_E is not None
        # Each of three updates moves each bias by the rate up or down (or not at all, at exactly the mean load).
        assert bias_E.abs().max() <= 3 * model.config.router_bias_rate + 1e-9
        assert bias_E.abs().sum() > 0


def test_packed_batches_train(tiny: tuple[str, ...], tmp_path: Path) -> None:
    overrides = [*tiny, "data.pack=true", "trainer.max_steps=3", f"paths.run_dir={tmp_path / 'run'}"]
    assert pretrain(compose_config("pretrain", overrides)).steps == 3


def test_tensorboard_beside_the_csv(tiny: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    overrides = [*tiny, "logger=tensorboard", "trainer.max_steps=2", f"paths.run_dir={tmp_path / 'run'}"]
    result = pretrain(compose_config("pretrain", overrides))
    assert list(result.run.path.rglob("events.out.tfevents*"))
    assert result.run.metrics_file.exists()


def nan_from_an_expert_layer(module: CausalModule, batch: Batch, batch_index: int) -> torch.Tensor:
    if batch_index == 10:
        layer = module.model.layers[1].moe
        layer.register_forward_hook(lambda module, inputs, output: (output[0] * float("nan"), output[1]))
    return original_step(module, batch, batch_index)


def overflow_in_the_backward_pass(module: CausalModule, batch: Batch, batch_index: int) -> torch.Tensor:
    return original_step(module, batch, batch_index) * (1e38 if batch_index == 10 else 1.0) ** 2


original_step = CausalModule.training_step


@pytest.mark.parametrize(
    ("step", "words"),
    [(nan_from_an_expert_layer, r"the output of layers\.1\.moe"), (overflow_in_the_backward_pass, "the gradient of")],
)
def test_nan_stops_with_step_layer_and_batch_and_keeps_the_last_good_checkpoint(
    step: Any, words: str, tiny: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CausalModule, "training_step", step)
    with pytest.raises(NonFiniteError, match=rf"not finite at step 11, first in {words}.*samples \d+, \d+"):
        pretrain(compose_config("pretrain", [*tiny, f"paths.run_dir={tmp_path / 'run'}"]))
    saved, path = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert saved == 7
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.isfinite(value).all() for value in state.values())
    assert not (tmp_path / "run" / "model").exists()


# ---- metrics.csv -------------------------------------------------------------------------------------------


def test_metrics_grow_columns_and_continue_from_a_step(tmp_path: Path) -> None:
    log = MetricsCsv(tmp_path / "metrics.csv")
    log.log_metrics({"a": 0.1}, step=1)
    log.log_metrics({"a": 0.2, "b": 1.0}, step=2)
    log.log_metrics({"c": 3.0}, step=2)
    log.log_metrics({"a": 1 / 3}, step=3)
    text = (tmp_path / "metrics.csv").read_text().splitlines()
    assert text == ["step,a,b,c", "1,0.1,,", "2,0.2,1.0,3.0", "3,0.3333333333333333,,"]
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,0.")  # cut short by a kill
    again = MetricsCsv(tmp_path / "metrics.csv")
    again.continue_from(2)
    again.log_metrics({"a": 5.0}, step=3)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [*text[:3], "3,5.0,,"]
