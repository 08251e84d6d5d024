"""Kill -9 a training process at any moment; the resumed one trains on exactly the batches that were due."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_corpora import random_letters, write_fasta

SCRIPT = Path(__file__).with_name("train_and_log.py")
ROOT = Path(__file__).parents[2]
STEPS = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    import numpy as np

    rng = np.random.default_rng(11)
    folder = tmp_path_factory.mktemp("data")
    return write_fasta(folder / "x.fa", {"x": random_letters(rng, 6000), "y": random_letters(rng, 3500)})


def start(data: Path, folder: Path, workers: int) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(SCRIPT), str(data), str(folder), str(workers), str(STEPS)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def lines(folder: Path) -> list[str]:
    log = folder / "log.txt"
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    process = start(data, folder, 0)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    whole = lines(folder)
    assert len(whole) == STEPS  # several epochs of 37 batches
    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("kill_after", "workers_before", "workers_after"), [(4, 0, 2), (17, 2, 0), (38, 1, 1)])
def test_the_batches_after_kill_9_are_those_that_were_due(
    data, uninterrupted, tmp_path, kill_after, workers_before, workers_after
):
    process = start(data, tmp_path, workers_before)
    while len(lines(tmp_path)) < kill_after and process.poll() is None:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)  # our own process group: the training process and its loader workers
    process.communicate(timeout=60)
    before = [line for line in lines(tmp_path) if line.count(" ") == 2 and len(line) > 70]
    assert before == uninterrupted[: len(before)]
    (tmp_path / "log.txt").unlink()

    resumed = start(data, tmp_path, workers_after)
    _, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors.decode()
    after = lines(tmp_path)
    step = int(after[0].split()[0])
    assert 0 <= len(before) - step <= 6  # it goes on from the last checkpoint, at most a few steps back
    assert len(after) >= 50
    assert after == uninterrupted[step:]  # tokens, labels, weights and losses, to the last bit
