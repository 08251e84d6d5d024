"""Bases per second from disk to packed batches, beside bare libraries that only fetch the same windows.

A row is one window length and implementation. GenoMoE's rows are end to end: windows, reverse complement, and a packed
(THD) batch of which tokens, labels, weights and positions are read in the main process, as training on a CPU does (a
GPU would widen them itself). The rows named "bare" only get the letters of
the very same windows in the same order, without any of that. GenoMoE is timed over whole epochs, each of which decodes
the whole corpus.

Every implementation of a window length is measured in turn, several times over, and the medians are kept, so that what
else the machine does falls on all of them alike; `load_average` says how much that was. Processor time is freer of it
than the clock: `mb_per_cpu_s` counts that of the measuring process (no loader processes), `mb_per_loader_cpu_s` that of
the loader processes (what one of them gives with a core of its own) and `mb_per_main_cpu_s` that of the main process
beside them, which receives and widens what the loaders send.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from genomoe.data.build import build_corpus
from genomoe.data.corpus import Corpus
from genomoe.data.datamodule import BatchLoader
from genomoe.data.dataset import StreamingGenomeDataset, epoch_windows
from genomoe.data.description import describe_paths
from genomoe.data.fasta_corpus import FastaCorpus
from genomoe.data.sampling import SamplingConfig
from genomoe.data.store import ZarrCorpus
from genomoe.genome.alphabet import make_tokenizer
from genomoe.genome.fasta import Reference

WINDOWS = (1024, 8192, 131_072, 1_048_576)
WORKERS = (1, 2)
CONTIGS = 10
BATCH_BASES = 131_072


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What to measure."""

    bases: int = 50_000_000
    """Size of the corpus that is made up."""
    windows: tuple[int, ...] = WINDOWS
    """Window lengths."""
    workers: tuple[int, ...] = WORKERS
    """Numbers of loader processes; 0, in the main process, is always measured too."""
    repeats: int = 3
    """Measurements of each row; the median counts."""
    seconds: float = 1.5
    """How long one measurement takes at least."""


Span = tuple[str, int, int]
Fetch = Callable[[Span], object]


class Rates(NamedTuple):
    """Bases per second of one measurement."""

    clock: float
    """By the clock."""
    processor: float
    """By the processor time of the measuring process."""
    loaders: float | None = None
    """By the processor time of the loader processes together."""


def make_inputs(folder: Path, bases: int) -> dict[str, Path]:
    """A made-up genome as plain FASTA, bgzip FASTA, Zarr store and memory map; a tenth of it soft-masked."""
    from pysam import BGZFile

    rng = np.random.default_rng(0)
    paths = {name: folder / name for name in ("genome.fa", "genome.fa.gz", "genome.zarr", "genome.bin")}
    length = bases // CONTIGS
    with open(paths["genome.fa"], "wb") as plain, open(paths["genome.bin"], "wb") as raw:
        for number in range(CONTIGS):
            letters = np.frombuffer(b"ACGT", dtype=np.uint8)[rng.integers(0, 4, length)]
            for start in rng.integers(0, length - 1000, length // 10_000):
                letters[start : start + 1000] |= 0x20
            raw.write(letters.tobytes())
            plain.write(b">c%d\n" % number)
            rows = letters[: length // 80 * 80].reshape(-1, 80)
            plain.write(np.pad(rows, ((0, 0), (0, 1)), constant_values=10).tobytes())
            plain.write(letters[length // 80 * 80 :].tobytes() + b"\n")
    with BGZFile(str(paths["genome.fa.gz"]), "wb", None) as out, open(paths["genome.fa"], "rb") as plain:
        while chunk := plain.read(1 << 20):
            out.write(chunk)
    build_corpus(describe_paths([str(paths["genome.fa"])]), paths["genome.zarr"])
    return paths


def measure_loaders(
    folder: Path, options: LoaderOptions, report: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """One flat row per window length and implementation (see the module's docstring)."""
    report("making the inputs")
    paths = make_inputs(folder, options.bases)
    corpora: dict[str, Corpus] = {
        "zarr": ZarrCorpus(paths["genome.zarr"]),
        "fasta": _indexed(paths["genome.fa"]),
        "bgzip": _indexed(paths["genome.fa.gz"]),
    }
    rows = []
    for window in options.windows:
        subjects = _subjects(window, options, paths, corpora)
        figures: dict[str, list[Rates]] = {name: [] for name in subjects}
        for turn in range(options.repeats):
            for name, subject in subjects.items():
                report(f"{window:,} bases, {name}, {turn + 1} of {options.repeats}")
                figures[name].append(subject())
        rows += _rows(window, figures, mixing(_dataset(corpora["zarr"], window)))
    return rows


def _indexed(path: Path) -> FastaCorpus:
    corpus = FastaCorpus([str(path)])
    corpus.references = [Reference(path, in_memory=False)]
    return corpus


def _dataset(corpus: Corpus, window: int) -> StreamingGenomeDataset:
    batch = max(1, BATCH_BASES // window)
    return StreamingGenomeDataset(
        corpus,
        SamplingConfig(window=window, lane_run=batch),
        make_tokenizer("nucleotide"),
        batch_size=batch,
        context_length=window,
        pack=True,
    )


def _subjects(
    window: int, options: LoaderOptions, paths: dict[str, Path], corpora: dict[str, Corpus]
) -> dict[str, Callable[[], Rates]]:
    """Implementation name to a function that measures it once: (bases/s by the clock, bases per processor second)."""
    plan = _dataset(corpora["zarr"], window)
    table = corpora["zarr"].contigs
    spans: list[Span] = []
    for windows in epoch_windows(plan):
        rows = np.searchsorted(table.offsets, windows.starts, side="right") - 1
        offsets = table.offsets[rows]
        spans += [
            (table.names[row], int(start), int(end))
            for row, start, end in zip(rows, windows.starts - offsets, windows.ends - offsets, strict=True)
        ]
    subjects: dict[str, Callable[[], Rates]] = {}
    for name, corpus in corpora.items():
        for workers in (0, *options.workers):
            subjects[f"genomoe {name}, {workers} workers"] = partial(
                _time_loader, corpus, window, workers, options.seconds
            )
    for name, fetch in _bare(paths, corpora).items():
        subjects[f"bare {name}"] = partial(_time_fetch, fetch, spans, options.seconds)
    return subjects


def _bare(paths: dict[str, Path], corpora: dict[str, Corpus]) -> dict[str, Fetch]:
    import pyfaidx
    import pysam
    from Bio import SeqIO

    plain, packed = str(paths["genome.fa"]), str(paths["genome.fa.gz"])
    faidx = pyfaidx.Fasta(plain, as_raw=True, sequence_always_upper=False)
    one, other = pysam.FastaFile(plain), pysam.FastaFile(packed)
    records = SeqIO.to_dict(SeqIO.parse(plain, "fasta"))
    memory = np.memmap(paths["genome.bin"], dtype=np.uint8, mode="r")
    offset = dict(zip(corpora["zarr"].contigs.names, corpora["zarr"].contigs.offsets.tolist(), strict=True))
    return {
        "pyfaidx": lambda s: faidx[s[0]][s[1] : s[2]],
        "pysam": lambda s: one.fetch(*s),
        "pysam bgzip": lambda s: other.fetch(*s),
        "Biopython in memory": lambda s: bytes(records[s[0]].seq[s[1] : s[2]]),
        "NumPy memory map": lambda s: np.array(memory[offset[s[0]] + s[1] : offset[s[0]] + s[2]]),
    }


def _time_fetch(fetch: Fetch, spans: Sequence[Span], seconds: float) -> Rates:
    for span in spans[:3]:
        fetch(span)
    bases, clock, processor = 0, time.perf_counter(), time.process_time()
    for span in spans:
        fetch(span)
        bases += span[2] - span[1]
        if time.perf_counter() - clock > seconds:
            break
    return Rates(bases / (time.perf_counter() - clock), bases / (time.process_time() - processor))


def _time_loader(corpus: Corpus, window: int, workers: int, seconds: float) -> Rates:
    """Whole epochs, so that every block is decoded in the time that counts; the first one only warms up."""
    loader = BatchLoader(_dataset(corpus, window), num_workers=workers)
    for _ in loader:
        pass
    children = [process.pid for process in multiprocessing.active_children()]
    bases, clock, processor, before = 0, time.perf_counter(), time.process_time(), _processor_seconds(children)
    while time.perf_counter() - clock < seconds:
        for batch in loader:
            read = batch.tokens, batch.labels, batch.weights, batch.position_ids  # what the training module reads
            bases += len(read[0])
    elapsed, own, theirs = time.perf_counter() - clock, time.process_time() - processor, _processor_seconds(children)
    loaders = bases / (theirs - before) if workers and theirs is not None and before is not None else None
    return Rates(bases / elapsed, bases / own, loaders)


def _processor_seconds(processes: Sequence[int | None]) -> float | None:
    """Processor time of other processes so far; None where the system doesn't tell."""
    ticks = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def mixing(dataset: StreamingGenomeDataset) -> dict[str, float]:
    """How well batches mix: over pairs of neighbours in a batch, the median distance in bases (and as a part of the
    corpus), and the part of the pairs from one block; a perfect shuffle has a median distance of 0.29 of the corpus.
    """
    distances, same = [], []
    size = dataset.batch_size
    for windows in epoch_windows(dataset):
        inside = (windows.number[1:] // size) == (windows.number[:-1] // size)
        distances.append(np.abs(np.diff(windows.starts))[inside])
        same.append((np.diff(windows.blocks) == 0)[inside])
    distance, together = np.concatenate(distances), np.concatenate(same)
    if not len(distance):
        return {}
    median = float(np.median(distance))
    return {
        "neighbour_distance_median_bases": median,
        "neighbour_distance_part_of_corpus": round(median / dataset.segments.bases, 4),
        "neighbours_in_one_block": round(float(together.mean()), 4),
        "blocks": len(dataset.plan().block_starts),
        "group_bases": dataset.config.group_bases,
        "lanes": dataset.config.lanes,
    }


def _rows(window: int, figures: dict[str, list[Rates]], mixed: dict[str, float]) -> list[dict[str, Any]]:
    clock = {name: statistics.median(value.clock for value in values) / 1e6 for name, values in figures.items()}
    processor = {name: statistics.median(value.processor for value in values) / 1e6 for name, values in figures.items()}
    rows = []
    for name in figures:
        ours = name.startswith("genomoe")
        kind, _, rest = name.removeprefix("genomoe ").partition(", ")
        workers = int(rest.split()[0]) if ours else 0
        row: dict[str, Any] = {
            "case": f"window {window}",
            "implementation": f"genomoe {kind}" if ours else name,
            "window_bases": window,
            "workers": workers,
            "mb_per_s": round(clock[name], 1),
            "mb_per_s_per_worker": round(clock[name] / max(workers, 1), 1),
            "load_average": round(os.getloadavg()[0], 1),
        }
        if not workers:
            row["mb_per_cpu_s"] = round(processor[name], 1)
        loaders = [value.loaders for value in figures[name] if value.loaders is not None]
        if loaders:
            row["mb_per_loader_cpu_s"] = round(statistics.median(loaders) / 1e6, 1)
            row["mb_per_main_cpu_s"] = round(processor[name], 1)
            row["loader_cpu_times_pysam_bgzip"] = round(
                statistics.median(loaders) / 1e6 / processor["bare pysam bgzip"], 3
            )
        if ours:
            for peer in ("pyfaidx", "pysam", "pysam bgzip", "Biopython in memory", "NumPy memory map"):
                key = peer.lower().replace(" ", "_")
                row[f"times_{key}"] = round(clock[name] / clock[f"bare {peer}"], 3)
                if not workers:
                    row[f"cpu_times_{key}"] = round(processor[name] / processor[f"bare {peer}"], 3)
            row |= mixed
        rows.append(row)
    return rows
