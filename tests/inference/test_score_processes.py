"""`genomoe score` as processes: killed and resumed, several under torchrun, and how much memory they take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_model

from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.model.pretrained import save_pretrained

pytestmark = pytest.mark.slow
ROWS = 30_000
"""30 chunks of 1,024 rows, the last one short; so many that writing them takes long enough to be killed in."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A reference, a tiny model, and a VCF of which every 50th row is scored (the others' REF is wrong)."""
    folder = tmp_path_factory.mktemp("score")
    sequence = "".join(np.random.default_rng(0).choice(list("ACGT"), 20_000))
    (folder / "ref.fa").write_text(f">chr1\n{sequence}\n")
    save_pretrained(tiny_model(), NucleotideTokenizer().to_dict(), folder / "model")
    write_vcf(folder / "in.vcf", sequence, ROWS, scored=50)
    return folder


def write_vcf(path: Path, sequence: str, rows: int, scored: int) -> None:
    with open(path, "w") as file:
        file.write("##fileformat=VCFv4.2\n##contig=<ID=chr1>\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n")
        for number in range(rows):
            at = number * len(sequence) // rows
            base = "ACGT".index(sequence[at])
            ref, alt = ("ACGT"[(base + (number % scored != 0) + shift) % 4] for shift in (0, 1))
            file.write(f"chr1\t{at + 1}\tv{number}\t{ref}\t{alt}\t.\t.\t.\n")


def arguments(folder: Path, out: Path, variants: str = "in.vcf") -> list[str]:
    return [
        "score", str(folder / variants), "--reference", str(folder / "ref.fa"), "--model", str(folder / "model"),
        "--out", str(out), "--ref-mismatch", "skip", "--window", "32", "--device", "cpu",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def score(folder: Path, out: Path) -> str:
    command = [sys.executable, "-m", "genomoe", *arguments(folder, out)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stderr


@pytest.fixture(scope="module")
def whole(folder) -> dict[str, bytes]:
    """What an uninterrupted run of one process writes: the file and its index."""
    out = folder / "whole.vcf.gz"
    assert f"{ROWS:,} ALTs in {ROWS:,} rows" in score(folder, out)
    return {end: out.with_name(f"whole.vcf.gz{end}").read_bytes() for end in ("", ".tbi")}


def wait_for(condition, process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)


def test_a_run_killed_twice_ends_as_one_that_was_not(folder, whole, tmp_path):
    out = tmp_path / "out.vcf.gz"
    journal = tmp_path / ".out.vcf.gz.scoring"
    command = [sys.executable, "-m", "genomoe", *arguments(folder, out)]

    def finished_bytes() -> int:
        return sum(part.stat().st_size for part in journal.glob("*.part"))

    def output_begun() -> bool:
        return finished_bytes() > 9 * ROWS and any(tmp_path.glob(".out.vcf.gz.*.tmp"))

    for reached in (lambda: finished_bytes() > 2 * 9 * 1024, output_begun):  # 9 bytes an ALT
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment())
        wait_for(reached, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
    told = score(folder, out)
    assert f"{ROWS:,} rows scored before the run was interrupted" in told
    assert out.read_bytes() == whole[""]
    assert out.with_name("out.vcf.gz.tbi").read_bytes() == whole[".tbi"]
    assert {path.name for path in tmp_path.iterdir()} == {"out.vcf.gz", "out.vcf.gz.tbi"}


def test_torchrun_writes_what_one_process_writes(folder, whole, tmp_path):
    out = tmp_path / "out.vcf.gz"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "genomoe", *arguments(folder, out)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stderr
    assert told.count("written:") == 1
    assert out.read_bytes() == whole[""]
    assert out.with_name("out.vcf.gz.tbi").read_bytes() == whole[".tbi"]
    assert {path.name for path in tmp_path.iterdir()} == {"out.vcf.gz", "out.vcf.gz.tbi"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
@pytest.mark.parametrize("end", ["vcf.gz", "parquet"])
def test_memory_does_not_grow_with_the_rows(folder, tmp_path, end):
    """Ten times the rows take no more memory; a list of the 180,000 more would take 100 MB."""
    sequence = (folder / "ref.fa").read_text().split("\n")[1]
    program = (
        "import sys\nfrom genomoe.cli import main\ntry:\n    main()\nfinally:\n"
        "    print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    peaks = []
    for rows in (20_000, 200_000):
        write_vcf(folder / f"{rows}.vcf", sequence, rows, scored=10_000)
        command = [sys.executable, "-c", program, *arguments(folder, tmp_path / f"{rows}.{end}", f"{rows}.vcf")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment())
        peaks.append(int(done.stdout.split()[-1]) / 1024)
    assert peaks[1] < peaks[0] + 15, "MiB"
