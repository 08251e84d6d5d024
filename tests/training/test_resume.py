"""An interrupted run goes on as if nothing had happened: same batches, same losses, same weights, to the last bit."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from genomoe.training.checkpoint import AtomicCheckpointIO, CheckpointError, checkpoint_path, list_checkpoints
from genomoe.training.compose import compose_config
from genomoe.training.options import ConfigError
from genomoe.training.run import pretrain

CLOCK = ["train/tokens_per_second"]


def start(overrides: tuple[str, ...], run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "genomoe", "pretrain", *overrides, f"paths.run_dir={run_dir}"]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(overrides: tuple[str, ...], run_dir: Path) -> str:
    process = start(overrides, run_dir)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def outcome(run_dir: Path) -> tuple[pd.DataFrame, bytes]:
    metrics = pd.read_csv(run_dir / "metrics.csv", dtype=str).drop(columns=CLOCK)
    return metrics, (run_dir / "model" / "model.safetensors").read_bytes()


def wait_for_step(step: int, process: subprocess.Popen[str], run_dir: Path) -> None:
    """Return as soon as metrics.csv holds a row of `step`."""
    deadline = time.monotonic() + 120
    metrics = run_dir / "metrics.csv"
    while not metrics.exists() or len(metrics.read_text().splitlines()) <= step:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)


@pytest.fixture(scope="module")
def uninterrupted(tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(tiny, folder)
    return folder


def test_the_run_directory_is_complete(uninterrupted: Path) -> None:
    files = {str(path.relative_to(uninterrupted)) for path in uninterrupted.rglob("*") if path.is_file()}
    assert files == {
        "config.yaml",
        "environment.json",
        "metrics.csv",
        "checkpoints/step-00000028.ckpt",
        "checkpoints/step-00000030.ckpt",
        *(f"model/{name}" for name in ("README.md", "config.json", "model.safetensors", "tokenizer.json")),
    }
    metrics = pd.read_csv(uninterrupted / "metrics.csv")
    assert list(metrics["step"]) == list(range(1, 31))
    assert metrics["val/bits_per_base"].notna().sum() == 3
    assert metrics["train/loss"].notna().all()


@pytest.mark.parametrize("kill_after", [1, 8, 23], ids="killed at step {}".format)
def test_kill_and_resume_equals_an_uninterrupted_run(
    kill_after: int, uninterrupted: Path, tiny: tuple[str, ...], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start(tiny, run_dir)
    wait_for_step(kill_after, process, run_dir)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (run_dir / "model").exists()
    finish((*tiny, "data.num_workers=2"), run_dir)  # the number of loader processes may differ
    for got, wanted in zip(outcome(run_dir), outcome(uninterrupted), strict=True):
        assert got.equals(wanted) if isinstance(got, pd.DataFrame) else got == wanted


def test_sigterm_saves_the_step_it_reached(uninterrupted: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rare = (*tiny, "callbacks.checkpoint.every_n_steps=1000")
    process = start(rare, run_dir)
    wait_for_step(5, process, run_dir)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "terminated after step" in output
    assert len(list_checkpoints(run_dir / "checkpoints")) == 1
    finish(rare, run_dir)
    for got, wanted in zip(outcome(run_dir), outcome(uninterrupted), strict=True):
        assert got.equals(wanted) if isinstance(got, pd.DataFrame) else got == wanted


def test_ctrl_c_saves_the_step_it_reached(uninterrupted: Path, tiny: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rare = (*tiny, "callbacks.checkpoint.every_n_steps=1000")
    process = start(rare, run_dir)
    wait_for_step(5, process, run_dir)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    [(step, _)] = list_checkpoints(run_dir / "checkpoints")
    assert f"genomoe: interrupted after step {step}, which was saved; start the same command again" in output
    assert "Traceback" not in output
    finish(rare, run_dir)
    for got, wanted in zip(outcome(run_dir), outcome(uninterrupted), strict=True):
        assert got.equals(wanted) if isinstance(got, pd.DataFrame) else got == wanted


def test_ctrl_c_without_checkpoints_is_a_keyboard_interrupt(tiny: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start((*tiny, "callbacks.checkpoint=null", "trainer.max_steps=100000"), run_dir)
    wait_for_step(5, process, run_dir)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "genomoe: interrupted." in output


def test_same_seed_same_weights_other_seed_others(tiny: tuple[str, ...], tmp_path: Path) -> None:
    short = [*tiny, "trainer.max_steps=3"]
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run = pretrain(compose_config("pretrain", [*short, f"seed={seed}", f"paths.run_dir={tmp_path / name}"])).run
        weights.append((run.model / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def interrupted(tiny: tuple[str, ...], run_dir: Path) -> None:
    """Leave what a run that was killed after its last checkpoint leaves."""
    pretrain(compose_config("pretrain", [*tiny, "trainer.max_steps=9", f"paths.run_dir={run_dir}"]))
    shutil.rmtree(run_dir / "model")


def test_a_finished_or_different_run_is_not_overwritten(tiny: tuple[str, ...], tmp_path: Path) -> None:
    where = f"paths.run_dir={tmp_path / 'run'}"
    interrupted(tiny, tmp_path / "run")
    short = [*tiny, "trainer.max_steps=9", where]
    with pytest.raises(ConfigError, match=r"other settings \(optim.learning_rate\)"):
        pretrain(compose_config("pretrain", [*short, "optim.learning_rate=1e-3"]))
    with pytest.raises(ConfigError, match="resume=never"):
        pretrain(compose_config("pretrain", [*short, "resume=never"]))
    assert pretrain(compose_config("pretrain", short)).steps == 9
    with pytest.raises(ConfigError, match="already holds a finished run"):
        pretrain(compose_config("pretrain", short))
    assert pretrain(compose_config("pretrain", [*tiny, where, "trainer.max_steps=12", "resume=always"])).steps == 12
    assert pretrain(compose_config("pretrain", [*tiny, where, "trainer.max_steps=2", "overwrite=true"])).steps == 2
    assert [step for step, _ in list_checkpoints(tmp_path / "run" / "checkpoints")] == [2]


def test_a_changed_corpus_is_refused_and_named(tiny: tuple[str, ...], tmp_path: Path) -> None:
    fasta = tmp_path / "genome.fa"
    fasta.write_text(">c\n" + "ACGTTGCATT" * 400 + "\n")
    overrides = ("data=fasta", f"data.train={fasta}", *tiny)
    interrupted(overrides, tmp_path / "run")
    fasta.write_text(">c\n" + "ACGTTGCATA" * 400 + "\n")
    with pytest.raises(ValueError, match=r"genome\.fa"):
        pretrain(compose_config("pretrain", [*overrides, "trainer.max_steps=9", f"paths.run_dir={tmp_path / 'run'}"]))


# ---- checkpoints -------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = AtomicCheckpointIO()
    path = checkpoint_path(tmp_path, 1)
    files.save_checkpoint({"x": torch.ones(3)}, path)

    def full(value: object, file: object) -> None:
        file.write(b"half of it")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    for target in (path, checkpoint_path(tmp_path, 2)):
        with pytest.raises(CheckpointError, match=r"No space left on device.*earlier ones are intact"):
            files.save_checkpoint({"x": torch.zeros(3)}, target)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.ckpt"]
    assert torch.equal(files.load_checkpoint(path)["x"], torch.ones(3))


def test_a_write_that_the_system_cuts_short_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    code = f"""
import resource, signal, sys, torch
from pathlib import Path
from genomoe.training.checkpoint import AtomicCheckpointIO, CheckpointError, checkpoint_path
files, folder = AtomicCheckpointIO(), Path({str(tmp_path)!r})
files.save_checkpoint({{"x": torch.ones(10)}}, checkpoint_path(folder, 1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    files.save_checkpoint({{"x": torch.ones(100_000)}}, checkpoint_path(folder, 2))
except CheckpointError as error:
    sys.exit(0 if "free some space" in str(error) else 2)
sys.exit(3)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.ckpt"]


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    files = AtomicCheckpointIO()
    path = checkpoint_path(tmp_path, 1)
    files.save_checkpoint({"x": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match="damaged"):
        files.load_checkpoint(path)
    torch.save({"x": 1}, path)
    with pytest.raises(CheckpointError, match="another version"):
        files.load_checkpoint(path)


def test_nothing_in_a_checkpoint_runs_code(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    torch.save({"genomoe_format": 1, "x": Path("/")}, path)  # an object that is neither tensor nor plain value
    with pytest.raises(CheckpointError):
        AtomicCheckpointIO().load_checkpoint(path)
