"""However many processes share a run out, and whatever each of them holds, it is the same run.

Two processes on the CPU (gloo) stand for two GPUs. All two-process runs but those that are killed or asked to stop
are made by one pair, since starting one takes longer than they do.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from torch import Tensor

from genomoe.model.pretrained import from_pretrained
from genomoe.parallel.group import leave_group
from genomoe.parallel.sharding import even_axis
from genomoe.training.callbacks import SAME_SIGNAL, Checkpoint
from genomoe.training.checkpoint import checkpoint_path, list_checkpoints
from genomoe.training.compose import compose_config
from genomoe.training.optim import OptimConfig
from genomoe.training.options import ConfigError
from genomoe.training.parallel import ParallelConfig
from genomoe.training.run import pretrain
from genomoe.training.run_directory import open_run

STEPS = 5
RESUMED = 2
"""Where runs go on elsewhere; even, so that no pair of accumulated batches is torn apart."""


def sender(signal: str, *, rank: int, to: str) -> tuple[str, ...]:
    fields = {"_target_": "train_jobs.SendSignal", "signal": signal, "rank": rank, "to": to}
    return ("callbacks.checkpoint.every_n_steps=1000", *(f"+callbacks.sender.{k}={v}" for k, v in fields.items()))


SMALL = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.head_size=16",
    "model.expert_size=32",
    "model.num_experts=3",  # which two ranks do not divide
    "data.context_length=64",
    "data.soft_mask_weight=0.1",  # ranks whose windows weigh more count more
    "+data.sampling.lane_run=1",  # windows in an order that does not depend on the batch size
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=5",
    "trainer.limit_val_batches=1",
    "callbacks.checkpoint.every_n_steps=1",
    "callbacks.checkpoint.keep=10",
    "optim.eps=1e-2",  # with 1e-8 Adam magnifies the rounding of gradients near 0, by dividing by their size
    "evaluate=false",
)
# Two batches in one process are two ranks with a batch each only if the mean of their losses is the loss of both, which
# holds for equal weights; the balance loss looks at the loads of one batch, or of all ranks.
LINEAR = ("data.batch_size=4", "data.soft_mask_weight=1.0", "model.aux_loss_coef=0")
ONE_OF_TWO = (*LINEAR, "parallel=single", "trainer.accumulate_grad_batches=2")
TWO = ("trainer.devices=2", "data.batch_size=4")
OPTIONS = (
    "+model.tie_embeddings=true",
    "+model.num_shared_experts=1",
    "+model.qk_norm=true",
    "+model.router_scores=sigmoid",
    "+model.router_bias_balancing=true",
)
LOW = ("precision=bf16", "activation=layer")
LOWER = ("precision=bf16", "precision.parameters=bfloat16", "activation=mlp", "optim.learning_rate=0.05")


SIGNALLED = {
    "ctrl-c": ("parallel=ddp", *sender("SIGINT", rank=0, to="group")),
    "rank-1": ("parallel=fsdp", *LINEAR, *sender("SIGTERM", rank=1, to="self")),
    "launcher": ("parallel=fsdp", *LINEAR, "data.num_workers=1", *sender("SIGTERM", rank=1, to="parent")),
}
"""Runs that are asked to stop in their second update, long before a checkpoint is due; torchrun asks loaders, too."""


def overrides(folder: Path, *more: str) -> list[str]:
    return [*SMALL, *more, f"paths.run_dir={folder}"]


def train(folder: Path, *more: str) -> None:
    pretrain(compose_config("pretrain", overrides(folder, *more)))


def torchrun_command(jobs: list[list[str]], folder: Path) -> list[str]:
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    worker = Path(__file__).with_name("train_jobs.py")
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(worker), str(file)]


def torchrun(jobs: list[list[str]], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, *torchrun_command(jobs, folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def interrupted_at(step: int, source: Path, folder: Path) -> Path:
    """What a copy of the run in `source` would have left, killed after its checkpoint of `step`."""
    (folder / "checkpoints").mkdir(parents=True)
    shutil.copy(source / "config.yaml", folder)
    shutil.copy(checkpoint_path(source / "checkpoints", step), folder / "checkpoints")
    return folder


def start_and_kill(folder: Path, *more: str) -> None:
    """Let Lightning start the processes of a run, and kill them all after its second step."""
    command = [sys.executable, "-m", "genomoe", "pretrain", *overrides(folder, *more)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    metrics = folder / "metrics.csv"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "model").exists()


def start_and_wait(command: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a run; one that has not ended after a minute is killed."""
    folder = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(
            [sys.executable, *command],
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folder},
        )
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun kills its processes, which are in sessions of their own
            time.sleep(40)
            os.killpg(process.pid, signal.SIGKILL)
        stderr.seek(0)
        return process.wait(), stderr.read()


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, str]]]:
    """A folder of the runs of `SIGNALLED`, and exit code and stderr of what started them, lightning or torchrun."""
    folder = tmp_path_factory.mktemp("signalled")
    jobs = {name: overrides(folder / name, *TWO, *more) for name, more in SIGNALLED.items()}
    by_lightning = start_and_wait(["-m", "genomoe", "pretrain", *jobs.pop("ctrl-c")])
    by_torchrun = start_and_wait(torchrun_command(list(jobs.values()), folder))
    return folder, {"lightning": by_lightning, "torchrun": by_torchrun}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, signalled: tuple[Path, dict[str, tuple[int, str]]]) -> Path:
    """A folder of finished runs; their names say how they were made."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "single", "data.batch_size=8")
    train(folder / "single-options", *OPTIONS, "data.batch_size=8")
    train(folder / "single-linear", *ONE_OF_TWO)
    interrupted_at(RESUMED, folder / "single-linear", folder / "single-to-fsdp")
    jobs = {
        "ddp": ("parallel=ddp",),
        "fsdp": ("parallel=fsdp", "+callbacks.shards._target_=train_jobs.RequireShards"),
        "fsdp-options": ("parallel=fsdp", *OPTIONS, "activation=layer_attention"),
        "ddp-bf16": ("parallel=ddp", *LOW),
        "fsdp-bf16": ("parallel=fsdp", *LOW),
        "ddp-bf16-weights": ("parallel=ddp", *LOWER),
        "fsdp-bf16-weights": ("parallel=fsdp", *LOWER),
        "fsdp-linear": ("parallel=fsdp", *LINEAR),
        "single-to-fsdp": ("parallel=fsdp", *LINEAR, "resume=always"),
        "killed": ("parallel=fsdp", *LINEAR),
    }
    start_and_kill(folder / "killed", *TWO, *jobs["killed"])
    for name in SIGNALLED:
        shutil.copytree(signalled[0] / name, folder / name)
    jobs |= {"ctrl-c": ("parallel=ddp",), "rank-1": jobs["fsdp-linear"], "launcher": jobs["fsdp-linear"]}
    torchrun([overrides(folder / name, *TWO, *more) for name, more in jobs.items()], folder)
    interrupted_at(RESUMED, folder / "fsdp-linear", folder / "fsdp-to-single")
    train(folder / "fsdp-to-single", *ONE_OF_TWO, "resume=always")
    return folder


def weights(run: Path) -> dict[str, Tensor]:
    return from_pretrained(run / "model")[0].state_dict()


def assert_same_updates(got: Path, wanted: Path, tolerance: float) -> None:
    """Each parameter differs by less than `tolerance` of all that training added to it after the first step."""
    start = torch.load(checkpoint_path(wanted / "checkpoints", 1), weights_only=True)["state_dict"]
    a, b = weights(got), weights(wanted)
    assert a.keys() == b.keys()
    for name, value in b.items():
        update = value - start[f"model.{name}"]
        assert update.norm() > 0 or value.dtype == torch.bfloat16, name  # which rounds small steps away from 1
        assert (a[name] - value).norm() <= tolerance * update.norm(), name


def assert_same_losses(got: Path, wanted: Path, tolerance: float) -> None:
    a, b = (pd.read_csv(run / "metrics.csv").set_index("step") for run in (got, wanted))
    assert list(a.index) == list(b.index) == list(range(1, STEPS + 1))
    for column in ("train/loss", "train/bits_per_base", "train/router_balance", "train/router_z", "train/grad_norm"):
        assert ((a[column] - b[column]).abs() < tolerance * b[column]).all(), column
    assert (a["train/expert_load_max"] == b["train/expert_load_max"]).all()
    assert (a["train/tokens_seen"] == b["train/tokens_seen"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("two", "one"), [("ddp", "single"), ("fsdp", "single"), ("fsdp-options", "single-options")])
def test_two_processes_train_the_same_model_as_one(two: str, one: str, runs: Path) -> None:
    """A mean or a norm over one rank's share would show: every update is clipped, by the norm over all shards."""
    assert (pd.read_csv(runs / one / "metrics.csv")["train/grad_norm"] > 1.0).all()
    assert_same_losses(runs / two, runs / one, 1e-5)
    assert_same_updates(runs / two, runs / one, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "tolerance"), [("bf16", 1e-5), ("bf16-weights", 5e-2)])
def test_low_precision_and_recomputation_are_divided_alike(what: str, tolerance: float, runs: Path) -> None:
    """Against copies of the model. Averages of bfloat16 gradients, and updates of bfloat16 weights, are rounded."""
    assert_same_losses(runs / f"fsdp-{what}", runs / f"ddp-{what}", tolerance)
    assert_same_updates(runs / f"fsdp-{what}", runs / f"ddp-{what}", tolerance)


@pytest.mark.slow
def test_the_router_stays_float32_among_bfloat16_weights(runs: Path) -> None:
    for name, tensor in weights(runs / "fsdp-bf16-weights").items():
        assert tensor.dtype == (torch.float32 if "router" in name else torch.bfloat16), name


# ---- checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("resumed", "like"), [("fsdp-to-single", "single-linear"), ("single-to-fsdp", "fsdp-linear")])
def test_a_checkpoint_goes_on_elsewhere(resumed: str, like: str, runs: Path) -> None:
    """From two processes to one and back: the state that one kind of run wrote is the state of the other."""
    assert_same_updates(runs / resumed, runs / like, 1e-5)
    a, b = (pd.read_csv(runs / run / "metrics.csv").set_index("step") for run in (resumed, like))
    assert list(a.index) == list(range(RESUMED + 1, STEPS + 1))
    for column in ("train/loss", "train/grad_norm"):
        assert ((a[column] - b[column].loc[a.index]).abs() < 1e-5 * b[column].loc[a.index]).all(), column


@pytest.mark.slow
def test_an_interrupted_run_may_be_divided_otherwise(runs: Path, tmp_path: Path) -> None:
    run = interrupted_at(RESUMED, runs / "fsdp", tmp_path / "run")
    _, checkpoint = open_run(compose_config("pretrain", overrides(run, *TWO, "parallel=ddp")))
    assert checkpoint == checkpoint_path(run / "checkpoints", RESUMED)


@pytest.mark.slow
def test_checkpoints_are_one_file_of_one_format(runs: Path) -> None:
    a, b = (
        torch.load(checkpoint_path(runs / run / "checkpoints", STEPS), weights_only=True)
        for run in ("fsdp-linear", "single-linear")
    )
    assert a.keys() == b.keys()
    assert list(a["state_dict"]) == list(b["state_dict"])
    [mine], [theirs] = a["optimizer_states"], b["optimizer_states"]
    assert [group["params"] for group in mine["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, moments in theirs["state"].items():
        for name, value in moments.items():
            assert type(mine["state"][index][name]) is Tensor
            assert (mine["state"][index][name] - value).norm() <= 1e-5 * value.norm(), (index, name)


@pytest.mark.slow
def test_killed_and_started_again_it_ends_as_if_it_had_not_been(runs: Path) -> None:
    """Lightning started the processes that were killed; torchrun's went on."""
    a, b = weights(runs / "killed"), weights(runs / "fsdp-linear")
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert_same_losses(runs / "killed", runs / "fsdp-linear", 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "names", "code", "message"),
    [
        ("lightning", ["ctrl-c"], 130, "interrupted after step 2, which was saved;"),
        ("torchrun", ["rank-1", "launcher"], 1, "terminated after step 2; start the same command again to go on from"),
    ],
)
def test_asked_to_stop_all_processes_save_the_update_under_way(
    launcher: str, names: list[str], code: int, message: str, signalled: tuple[Path, dict[str, tuple[int, str]]]
) -> None:
    """Whoever was asked; and rank 0 alone says so, once a run."""
    folder, results = signalled
    returncode, stderr = results[launcher]
    for name in names:
        assert [step for step, _ in list_checkpoints(folder / name / "checkpoints")] == [2], stderr
    assert returncode == code, stderr
    assert stderr.count(f"genomoe: {message}") == len(names), stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "like"), [("ctrl-c", "ddp"), ("launcher", "fsdp-linear"), ("rank-1", "fsdp-linear")])
def test_stopped_and_started_again_it_ends_as_if_it_had_not_been(name: str, like: str, runs: Path) -> None:
    a, b = weights(runs / name), weights(runs / like)
    assert all(torch.equal(a[key], b[key]) for key in b)
    assert [step for step, _ in list_checkpoints(runs / name / "checkpoints")] == [2, 3, 4, 5]
    assert_same_losses(runs / name, runs / like, 1e-12)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it comes on the heels of the first: then it is the same one, passed on by a launcher."""
    trainer = Mock(global_step=0, is_global_zero=True)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    kill = Mock()
    monkeypatch.setattr(os, "kill", kill)
    try:
        Checkpoint(tmp_path).on_train_start(trainer, Mock())
        signal.raise_signal(number)
        signal.raise_signal(number)
        kill.assert_not_called()
        later = time.monotonic() + 2 * SAME_SIGNAL
        monkeypatch.setattr(time, "monotonic", lambda: later)
        signal.raise_signal(number)
        kill.assert_called_once_with(os.getpid(), number)
        trainer.strategy.launcher.kill.assert_called_once_with(signal.SIGKILL)
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    finally:
        for n, handler in handlers.items():
            signal.signal(n, handler)


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_device_may_be_sharded_too(runs: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "genomoe", "pretrain", *overrides(tmp_path / "run"), "data.batch_size=8"]
    done = subprocess.run([*command, "parallel=fsdp"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert_same_updates(tmp_path / "run", runs / "single", 1e-5)


def test_axes_are_divided_evenly_where_one_can_be() -> None:
    shapes = {(8, 64, 32): 0, (3, 64, 32): 1, (3, 5, 32): 2, (3, 5): 0, (32,): 0}
    assert {shape: even_axis(torch.empty(shape), 4) for shape in shapes} == shapes


def test_what_does_not_go_together_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"parallel\.strategy=zero is not allowed: it must be one of single, ddp, fsdp"
    ):
        ParallelConfig.from_config({"strategy": "zero"}, where="parallel")
    with pytest.raises(ConfigError, match=r"parallel=single trains on one device.*ask for 2: use parallel=ddp"):
        train(tmp_path / "run", "trainer.devices=2")
    with pytest.raises(ConfigError, match=r"parallel=fsdp cannot divide optim\.moments=int8: use optim\.moments=full"):
        ParallelConfig(strategy="fsdp").check(2, OptimConfig(moments="int8"))
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs torch\.distributed.*use parallel=single"):
        ParallelConfig(strategy="ddp").check(2, OptimConfig())
    ParallelConfig().check(1, OptimConfig())
    assert not (tmp_path / "run").exists()


def test_a_group_is_left_once(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    leave_group()
    assert not torch.distributed.is_initialized()
    leave_group()
