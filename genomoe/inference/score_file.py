"""A variant file to a scored file: streamed, resumable, by one process or several.

The input is read three times: once to find what is wrong with it before anything is computed, once to score
it in chunks of rows, once to write the output beside the chunks' results. So memory is flat however long the
file is.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genomoe.genome.errors import GenoMoEError
from genomoe.genome.variant_files import InputRow, VariantSource
from genomoe.genome.variant_output import open_output, remove_leftovers
from genomoe.genome.variants import Status
from genomoe.inference.journal import Journal
from genomoe.inference.scoring import VariantScorer
from genomoe.wording import counted

__all__ = ["FileSummary", "score_file"]

Progress = Callable[[str, int, int | None], None]
"""`(what is being done, rows done, rows in all if known)`."""


@dataclass(frozen=True, kw_only=True)
class FileSummary:
    """What a run did."""

    rows: int
    alts: int
    statuses: dict[str, int]
    """How many ALTs had each status."""
    resumed_rows: int
    """Rows whose scores an earlier, interrupted run had left."""
    seconds: float


def score_file(
    scorer: VariantScorer,
    source: VariantSource,
    output: str | Path,
    *,
    model_id: str,
    reference: str | Path,
    key: str = "GENOMOE",
    chunk_rows: int = 1024,
    restart: bool = False,
    progress: Progress | None = None,
) -> FileSummary | None:
    """Scores every ALT of `source` and writes `output`; None in all processes but the first.

    Under torchrun each process scores every n-th chunk; the first waits for the others and writes the output.

    Args:
        model_id: what tells this model from others, kept with the unfinished run.
        reference: path of the reference, likewise.
        key: name of the INFO field or column.
        chunk_rows: rows scored and saved at a time.
        restart: forget an unfinished run.
        progress: called after each chunk, when the input is checked, scored and written.

    Raises GenoMoEError for an output that cannot be written, the input itself among them, for what the options make an
    error in a row, and for an unfinished run of another job.
    """
    started = time.monotonic()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    output = Path(output)
    if restart and world > 1:
        raise GenoMoEError(f"With several processes remove .{output.name}.scoring yourself instead of --restart.")
    if output.exists() and output.samefile(source.path):
        raise GenoMoEError(f"The output {output} is the input itself: give it a name of its own.")
    description = scorer.options.description
    with open_output(output, source, key=key, description=description) as trial:
        trial.discard()  # a wrong name, folder or key is found before anything is computed
    tell = progress or (lambda *_: None)
    total = _check_all(scorer, source, chunk_rows, tell)
    if rank and rank * chunk_rows >= total:
        return None  # nothing to share with so many processes
    job = {
        "input": _identity(source.path),
        "reference": _identity(Path(reference)),
        "model": model_id,
        **scorer.numerics,
        "chunk_rows": chunk_rows,
        **{name: value for name, value in dataclasses.asdict(scorer.options).items() if not name.startswith("batch_")},
    }
    journal = Journal(output, job, restart=restart, process=rank)
    complete = False
    try:
        resumed = min(total, len(journal) * chunk_rows)
        for number, rows in _chunks(source, chunk_rows):
            if number % world == rank and number not in journal:
                scored = scorer.score_rows(rows, str(source.path))
                journal.append(number, [result for results in scored for result in results])
            tell("scoring", min(total, (number + 1) * chunk_rows), total)
        if rank != 0:
            return None
        statuses: Counter[str] = Counter()
        remove_leftovers(output)
        with open_output(output, source, key=key, description=description) as writer:
            for number, rows in _chunks(source, chunk_rows):
                _wait_for(journal, number)
                results = iter(journal.read(number))
                for row in rows:
                    found = list(itertools.islice(results, len(row.alts)))
                    statuses.update(status.value for _, status in found)
                    writer.write(row, found)
                tell("writing", min(total, (number + 1) * chunk_rows), total)
        complete = True
    finally:
        journal.close(remove=complete)
    return FileSummary(
        rows=total,
        alts=sum(statuses.values()),
        statuses=dict(statuses.most_common()),
        resumed_rows=resumed,
        seconds=time.monotonic() - started,
    )


def _check_all(scorer: VariantScorer, source: VariantSource, chunk_rows: int, tell: Progress) -> int:
    """Reads the whole file and checks each row but for its bases in the reference; returns the number of rows."""
    total = 0
    for total, row in enumerate(source.rows(), start=1):
        if scorer.options.unknown_contig == "error" and scorer.names.find(row.contig) is None:
            scorer.check(row, row.alts[0], str(source.path))
        if total % chunk_rows == 0:
            tell("checking the input", total, None)
    return total


def _chunks(source: VariantSource, size: int) -> Iterator[tuple[int, list[InputRow]]]:
    rows = source.rows()
    for number in itertools.count():
        chunk = list(itertools.islice(rows, size))
        if not chunk:
            return
        yield number, chunk


def _wait_for(journal: Journal, number: int) -> None:
    """Until another process has finished the chunk; torchrun ends this one if that one fails."""
    while number not in journal:
        time.sleep(0.2)
        journal.refresh()


def _identity(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"path": str(path.resolve()), "size": stat.st_size, "modified": stat.st_mtime_ns}


def summary_lines(summary: FileSummary) -> list[str]:
    """What a person wants to know after a run."""
    rate = summary.alts / max(summary.seconds, 1e-9)
    lines = [
        f"{counted(summary.alts, 'ALT')} in {counted(summary.rows, 'row')}, "
        f"{summary.seconds:.1f} s ({rate:.0f} a second)"
    ]
    if summary.resumed_rows:
        lines.append(f"{counted(summary.resumed_rows, 'row')} scored before the run was interrupted")
    lines += [
        f"{count} without a score: {status}"
        for status, count in summary.statuses.items()
        if not Status(status).has_score
    ]
    return lines
