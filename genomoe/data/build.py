"""Build a corpus store: parse the files in parallel, lay them out, compress the shards in parallel, rename.

Memory stays at a few chunks per process whatever the corpus: the parsed letters go through a temporary raw file
beside the store. Every process writes whole shards of its own, so none waits for another.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from genomoe.data.corpus import (
    CASE_SAMPLE,
    ContigTable,
    Segments,
    contig_table,
    is_masking,
)
from genomoe.data.description import CorpusDescription, SourceDescription
from genomoe.data.parse import ParsedContig, ParsedFile, parse_file
from genomoe.data.selection import FoundContig, chosen, place_regions, require_unique, union_runs
from genomoe.data.store import ALPHABET, BASES_PER_BYTE, CHUNK, FORMAT, SHARD, ZarrCorpus, array_sha256, pack
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta_parser import Verdict

SHARD_BASES = SHARD * BASES_PER_BYTE
Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total)."""


def build_corpus(
    description: CorpusDescription,
    out: str | os.PathLike[str],
    *,
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
    report: Callable[[Verdict], None] | None = None,
) -> ZarrCorpus:
    """Build the store `out` from a description; it appears whole or not at all.

    Args:
        description: sources and filters.
        out: folder to create.
        workers: processes for parsing and for compressing.
        overwrite: replace an existing store (the old one stays until the new one is whole).
        progress: called as work proceeds.
        report: called with each warning of the parser.

    Raises InputError at the first error in a source file; nothing is left behind then.
    """
    target = Path(out)
    if target.exists() and not overwrite:
        raise GenoMoEError(f"{target} exists; choose another name or pass --overwrite.")
    if workers < 1:
        raise GenoMoEError(f"workers must be at least 1, got {workers}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.building-{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _build(description, scratch, workers, progress or (lambda *_: None), report or (lambda _: None))
        shutil.rmtree(scratch / "raw")
        _replace(scratch / "store", target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ZarrCorpus(target)


def _replace(new: Path, target: Path) -> None:
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _pool(workers: int) -> Iterator[Callable[..., Iterator[tuple[int, Any]]]]:
    """A function that runs `function(*args)` for many args and yields (number, result) as they finish."""
    if workers == 1:
        yield lambda function, calls: ((n, function(*args)) for n, args in enumerate(calls))
        return
    # Spawned: forking a process in which Zarr or PyTorch runs threads can hang.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:

        def run(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
            futures = {executor.submit(function, *args): n for n, args in enumerate(calls)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

        yield run


class _Span(NamedTuple):
    """A stretch of the global axis and where its letters lie."""

    start: int
    end: int
    raw: Path
    offset: int


def _build(
    description: CorpusDescription,
    scratch: Path,
    workers: int,
    progress: Progress,
    report: Callable[[Verdict], None],
) -> None:
    raw = scratch / "raw"
    raw.mkdir()
    calls = [
        (file, raw / f"{number}-{nth}")
        for number, source in enumerate(description.sources)
        for nth, file in enumerate(source.files)
    ]
    with _pool(workers) as run:
        parsed: list[ParsedFile | None] = [None] * len(calls)
        for done, (number, result) in enumerate(run(parse_file, calls), 1):
            parsed[number] = result
            progress("parsing files", done, len(calls))
        files = [file for file in parsed if file is not None]
        for file in files:
            for verdict in file.warnings:
                report(verdict)
        layout = _Layout(description, files)
        _write_store(layout, scratch / "store")
        total = int(layout.table.lengths.sum())
        jobs = [
            (
                scratch / "store",
                start // BASES_PER_BYTE,
                layout.spans_of(start, min(start + SHARD_BASES, total)),
            )
            for start in range(0, total, SHARD_BASES)
        ]
        for done, _ in enumerate(run(write_shard, jobs), 1):
            progress("compressing", done, len(jobs))
    _write_attributes(layout, scratch / "store")


class _Layout:
    """Where everything goes: the contig table, segments, mask and raw spans of a corpus."""

    def __init__(self, description: CorpusDescription, files: list[ParsedFile]) -> None:
        self.description = description
        self.files: list[list[ParsedFile]] = []
        self.rows: list[ParsedContig] = []
        self.spans: list[_Span] = []
        numbers: list[int] = []
        runs: list[list[np.ndarray]] = []
        letters: list[np.ndarray] = [np.empty((0, 3), dtype=np.int64)]
        lengths: list[dict[str, int]] = []
        queue = iter(files)
        place = 0
        for number, source in enumerate(description.sources):
            own = [next(queue) for _ in source.files]
            self.files.append(own)
            found = [FoundContig(c.name, c.length, c.unknown, f.path) for f in own for c in f.contigs]
            require_unique(source, found)
            lengths.append({contig.name: contig.length for contig in found})
            keep = set(chosen(source, found))
            nth = 0
            runs.append([])
            for file in own:
                offset = 0
                for contig in file.contigs:
                    if nth in keep:
                        self.rows.append(contig)
                        numbers.append(number)
                        self.spans.append(_Span(place, place + contig.length, file.raw, offset))
                        first = np.searchsorted(file.lower[:, 0], offset)
                        last = np.searchsorted(file.lower[:, 0], offset + contig.length)
                        if last > first:
                            runs[-1].append(file.lower[first:last] + (place - offset))
                        first = np.searchsorted(file.letters[:, 0], offset)
                        last = np.searchsorted(file.letters[:, 0], offset + contig.length)
                        if last > first:
                            letters.append(file.letters[first:last] + np.array([1, 1, 0]) * (place - offset))
                        place += contig.length
                    offset += contig.length
                    nth += 1
        self.table: ContigTable = contig_table(
            [row.name for row in self.rows], [row.length for row in self.rows], numbers
        )
        self.letters = np.concatenate(letters)
        self._place(lengths, runs)

    def _place(self, lengths: list[dict[str, int]], runs: list[list[np.ndarray]]) -> None:
        segments, masks = [], []
        self.soft_masked: list[bool] = []
        for number, source in enumerate(self.description.sources):
            rows = np.flatnonzero(self.table.sources == number)
            placed = place_regions(source, number, self.table, rows, lengths[number])
            own = np.concatenate([np.empty((0, 2), dtype=np.int64), *runs[number]])
            if not self._case_is_mask(source, rows, own):
                own = own[:0]
            mask = union_runs(own, placed.mask)
            self.soft_masked.append(bool(len(mask)) or bool(source.soft_mask))
            segments.append(placed.segments)
            masks.append(mask)
        self.segments = Segments(*(np.concatenate(columns) for columns in zip(*segments, strict=True)))
        self.mask = np.concatenate(masks)
        self._starts = np.array([span.start for span in self.spans])

    def _case_is_mask(self, source: SourceDescription, rows: np.ndarray, runs: np.ndarray) -> bool:
        if source.soft_mask is not None:
            return source.soft_mask
        start = int(self.table.offsets[rows[0]])
        size = min(CASE_SAMPLE, int(self.table.lengths[rows].sum()))
        inside = np.clip(runs, start, start + size)
        return is_masking(int((inside[:, 1] - inside[:, 0]).sum()), size)

    def spans_of(self, start: int, end: int) -> list[_Span]:
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        cut = []
        for span in self.spans[first:last]:
            low, high = max(span.start, start), min(span.end, end)
            if high > low:
                cut.append(_Span(low, high, span.raw, span.offset + low - span.start))
        return cut


def write_shard(store: Path, start: int, spans: list[_Span]) -> None:
    """Compress one shard of the sequence; called in any process, each shard once."""
    packed = pack(read_spans(spans).tobytes())
    array: Any = zarr.open_group(str(store), mode="r+", zarr_format=3)["sequence"]
    array[start : start + len(packed)] = packed


def read_spans(spans: list[_Span]) -> np.ndarray:
    """The letters of raw spans, end to end."""
    out = np.empty(sum(span.end - span.start for span in spans), dtype=np.uint8)
    place = 0
    handle = None
    current = None
    try:
        for span in spans:
            if span.raw != current:
                if handle is not None:
                    handle.close()
                handle, current = open(span.raw, "rb", buffering=0), span.raw  # noqa: SIM115 - closed below
            assert handle is not None
            handle.seek(span.offset)
            size = span.end - span.start
            if handle.readinto(memoryview(out)[place : place + size]) != size:  # type: ignore[arg-type]
                raise OSError(f"{span.raw} is shorter than it was")
            place += size
    finally:
        if handle is not None:
            handle.close()
    return out


def _write_store(layout: _Layout, path: Path) -> None:
    group = zarr.create_group(str(path), zarr_format=3)
    total = -(-int(layout.table.lengths.sum()) // BASES_PER_BYTE)
    shard = min(SHARD, -(-max(total, 1) // CHUNK) * CHUNK)
    group.create_array(
        "sequence",
        shape=(total,),
        dtype="uint8",
        chunks=(CHUNK,),
        shards=(shard,),
        compressors=[ZstdCodec(level=1), Crc32cCodec()],
        fill_value=0,
    )
    for name, values in _tables(layout).items():
        rows = max(1, min(len(values), 1 << 18))
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(rows, *values.shape[1:]),
            compressors=ZstdCodec(),
        )
        if values.size:
            array[:] = values


def _tables(layout: _Layout) -> dict[str, np.ndarray]:
    names = b"".join(name.encode() + b"\0" for name in layout.table.names)
    segments = layout.segments
    contigs = [
        (row.length, int(source), row.unknown, row.gc, row.ambiguous, row.content)
        for row, source in zip(layout.rows, layout.table.sources, strict=True)
    ]
    return {
        "letters": layout.letters,
        "mask_runs": layout.mask,
        "contig_names": np.frombuffer(names, dtype=np.uint8),
        "contigs": np.array(contigs, dtype=np.int64),
        "segments": np.stack([segments.starts, segments.ends, segments.sources.astype(np.int64)], axis=1),
    }


def _write_attributes(layout: _Layout, path: Path) -> None:
    digest = hashlib.sha256()
    total = int(layout.table.lengths.sum())
    for start in range(0, total, SHARD_BASES):
        letters = read_spans(layout.spans_of(start, min(start + SHARD_BASES, total)))
        digest.update(pack(letters.tobytes()).data)
    sources: list[Any] = []
    for source, files, masked in zip(layout.description.sources, layout.files, layout.soft_masked, strict=True):
        sources.append(
            {
                "name": source.name,
                "weight": source.weight,
                "soft_masked": masked,
                "tags": dict(source.tags),
                "split": source.split,
                "files": [
                    {
                        "path": str(file.path.resolve()),
                        "size": file.size,
                        "mtime_ns": file.mtime_ns,
                        "sha256": file.sha256,
                        "contigs": len(file.contigs),
                    }
                    for file in files
                ],
            }
        )
    group = zarr.open_group(str(path), mode="r+", zarr_format=3)
    group.attrs["genomoe"] = {
        "format": FORMAT,
        "alphabet": ALPHABET,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "written_by": f"genomoe {_version()}",
        "sources": sources,
        "sequence_sha256": digest.hexdigest(),
        "table_sha256": {name: array_sha256(values) for name, values in _tables(layout).items()},
    }


def _version() -> str:
    try:
        return importlib.metadata.version("genomoe")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
