"""`genomoe corpus build | validate | describe | leakage`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from genomoe.data.build import build_corpus
from genomoe.data.open import as_description, is_store, open_corpus
from genomoe.data.store import ZarrCorpus
from genomoe.genome.errors import GenoMoEError
from genomoe.wording import counted

if TYPE_CHECKING:
    import pandas as pd

Reporter = Callable[[str, int, int], None]


@contextmanager
def _progress() -> Iterator[Reporter]:
    """Progress on stderr, on one line where it is a terminal, otherwise a line every ten seconds."""
    state = {"last": time.monotonic(), "open": False}
    terminal = sys.stderr.isatty()

    def report(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if terminal:
            sys.stderr.write(f"\r{what} {done}/{total}   ")
            state["open"] = True
        elif now - state["last"] > 10:
            state["last"] = now
            sys.stderr.write(f"{what} {done}/{total}\n")
        sys.stderr.flush()

    try:
        yield report
    finally:
        if state["open"]:
            sys.stderr.write("\n")


def build(inputs: list[str], out: Path, *, workers: int, overwrite: bool) -> None:
    """Build a store and print what is in it."""
    started = time.monotonic()
    description = as_description(inputs)
    with _progress() as progress:
        corpus = build_corpus(
            description,
            out,
            workers=workers,
            overwrite=overwrite,
            progress=progress,
            report=lambda verdict: print(verdict, file=sys.stderr),
        )
    bases = int(corpus.contigs.lengths.sum())
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(
        f"{out}: {counted(bases, 'base')} of {counted(len(corpus.contigs.names), 'contig')} from "
        f"{counted(len(corpus.sources), 'source')}, {size / 1e6:.1f} MB, in {time.monotonic() - started:.1f} s"
    )


def validate(inputs: list[str], *, as_json: bool) -> int:
    """Print a verdict per fault; returns the exit code: 1 when any is an error."""
    from genomoe.data.validate import validate_corpus

    if len(inputs) == 1 and is_store(inputs[0]):
        corpus = ZarrCorpus(inputs[0])
        corpus.verify()
        if as_json:
            print(json.dumps({"store": inputs[0], "errors": 0, "verdicts": []}))
        else:
            print(f"{inputs[0]}: ok, {counted(int(corpus.contigs.lengths.sum()), 'base')}, every hash agrees")
        return 0
    with _progress() as progress:
        checks = validate_corpus(as_description(inputs), progress)
    errors = sum(check.errors for check in checks)
    if as_json:
        rows = [
            {
                "file": str(check.path),
                "contigs": check.contigs,
                "bases": check.bases,
                "errors": check.errors,
                "warnings": check.warnings,
                "verdicts": [vars(verdict) for verdict in check.verdicts],
            }
            for check in checks
        ]
        print(json.dumps({"errors": errors, "files": rows}, indent=2))
        return 1 if errors else 0
    for check in checks:
        for verdict in check.verdicts:
            print(verdict)
        hidden = check.errors + check.warnings - len(check.verdicts)
        if hidden:
            print(f"{check.path}: and {counted(hidden, 'more verdict')}")
        if not check.errors:
            print(f"{check.path}: ok, {counted(check.bases, 'base')} in {counted(check.contigs, 'record')}")
    if errors:
        faulty = sum(check.errors > 0 for check in checks)
        print(f"{counted(errors, 'error')} in {faulty} of {counted(len(checks), 'file')}", file=sys.stderr)
    return 1 if errors else 0


def describe(inputs: list[str], *, as_json: bool, report: Path | None) -> None:
    """Print sizes, composition and duplicates, and write the HTML report where asked."""
    from genomoe.data.statistics import contig_statistics, duplicate_contigs, source_statistics, write_report

    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise GenoMoEError(f"The report is an HTML page; name it with .html, not {report.name!r}.")
    corpus = open_corpus(inputs)
    contigs = contig_statistics(corpus)
    sources = source_statistics(contigs)
    duplicates = duplicate_contigs(contigs)
    if report is not None:
        write_report(report, f"Corpus {', '.join(inputs)}", sources, contigs, duplicates)
    if as_json:
        document: dict[str, Any] = {
            "sources": json.loads(sources.to_json(orient="records")),
            "duplicates": json.loads(duplicates.to_json(orient="records")),
        }
        if isinstance(corpus, ZarrCorpus):
            keys = ("format", "alphabet", "created", "written_by", "sequence_sha256")
            document["store"] = {key: corpus.attributes[key] for key in keys}
            document["files"] = [file for source in corpus.attributes["sources"] for file in source["files"]]
        print(json.dumps(document, indent=2))
        return
    console = Console()
    console = Console(width=max(console.width, 120))
    console.print(_source_table(", ".join(inputs), sources))
    for row in duplicates.head(20).to_dict("records"):
        console.print(
            f"{escape(row['source'])}/{escape(row['contig'])} has the same letters as {escape(row['same_as'])}"
        )
    if not len(duplicates):
        console.print("No two contigs are the same.")
    elif len(duplicates) > 20:
        console.print(f"and {len(duplicates) - 20:,} more duplicates")


def _source_table(title: str, sources: pd.DataFrame) -> Table:
    table = Table(title=escape(title))
    for column in sources.columns:
        left = column == "source"
        table.add_column(column, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for row in sources.itertuples(index=False):
        cells = (
            f"{value:.2%}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
            for value in row
        )
        table.add_row(*(escape(str(cell)) for cell in cells))
    return table


def leakage(train: list[str], held_out: list[str], *, window: int, threshold: float, out: Path | None) -> int:
    """Print held-out windows that nearly equal training sequence; returns 1 when there is any."""
    from genomoe.data.splits import find_leaks

    held = open_corpus(held_out)
    leaks = find_leaks(open_corpus(train), held, window=window, threshold=threshold)
    if out is not None:
        leaks.to_csv(out, sep="\t", index=False)
    total = int((-(-(held.segments.ends - held.segments.starts) // window)).sum())
    for row in leaks.head(20).to_dict("records"):
        print(
            f"{row['source']}/{row['contig']}:{row['start'] + 1}-{row['end']} shares {row['shared']:.0%} of its k-mers "
            f"(identity about {row['identity']:.1%}) with {row['train_source']}/{row['train_contig']} near "
            f"{row['train_position'] + 1}"
        )
    if len(leaks) > 20:
        print(f"and {len(leaks) - 20:,} more")
    print(f"{len(leaks):,} of {total:,} held-out windows of {window:,} bases occur in the training data")
    return 1 if len(leaks) else 0
