"""What a corpus holds: sizes, GC, N, soft-masking and duplicates, as tables and as an HTML page."""

from __future__ import annotations

import hashlib
import html
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from genomoe.data.corpus import Corpus
from genomoe.data.store import ZarrCorpus
from genomoe.files import replacing

_STEP = 1 << 24


def contig_statistics(corpus: Corpus) -> pd.DataFrame:
    """One row per contig: source, contig, bases, gc, n, ambiguous, soft_masked (all counts) and content (a hash).

    A store answers from its tables; sequence files are read through once.
    """
    contigs = corpus.contigs
    if isinstance(corpus, ZarrCorpus):
        _, _, unknown, gc, ambiguous, content = corpus.composition.T
        masked = _masked_per_contig(corpus)
    else:
        rows = [
            _count(corpus, offset, offset + length)
            for offset, length in zip(contigs.offsets.tolist(), contigs.lengths.tolist(), strict=True)
        ]
        unknown, gc, ambiguous, masked, content = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return pd.DataFrame(
        {
            "source": [corpus.sources[number].name for number in contigs.sources],
            "contig": contigs.names,
            "bases": contigs.lengths,
            "gc": gc,
            "n": unknown,
            "ambiguous": ambiguous,
            "soft_masked": masked,
            "content": content,
        }
    )


def _count(corpus: Corpus, start: int, end: int) -> tuple[int, int, int, int, int]:
    unknown = gc = ambiguous = lower = 0
    digest = hashlib.sha256()
    for low in range(start, end, _STEP):
        piece = corpus.read(low, min(low + _STEP, end)).tobytes()
        letters = piece.upper().replace(b"U", b"T")
        lower += int((np.frombuffer(piece, dtype=np.uint8) >= 97).sum())
        n = letters.count(b"N")
        unknown += n
        gc += letters.count(b"G") + letters.count(b"C")
        ambiguous += len(letters.translate(None, b"ACGT")) - n
        digest.update(letters)
    return unknown, gc, ambiguous, lower, int.from_bytes(digest.digest()[:8], "little", signed=True)


def _masked_per_contig(corpus: ZarrCorpus) -> np.ndarray:
    runs = corpus.mask_runs
    covered = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
    edges = np.append(corpus.contigs.offsets, int(corpus.contigs.lengths.sum()))
    row = np.searchsorted(runs[:, 0], edges, side="left")  # runs that start before each edge
    before = covered[row]
    if len(runs):
        last = np.maximum(row - 1, 0)
        before = before - np.where(row > 0, np.maximum(runs[last, 1] - edges, 0), 0)
    return np.diff(before)


def source_statistics(contigs: pd.DataFrame) -> pd.DataFrame:
    """One row per source and a last row 'all': contigs, bases, shortest, longest, n50, and parts of the bases
    gc (of A, C, G and T), n, ambiguous and soft_masked."""
    rows = [_summary(name, part) for name, part in contigs.groupby("source", sort=False)]
    if len(rows) != 1:
        rows.append(_summary("all", contigs))
    return pd.DataFrame(rows)


def _summary(name: Any, part: pd.DataFrame) -> dict[str, Any]:
    bases = int(part["bases"].sum())
    known = bases - int(part["n"].sum()) - int(part["ambiguous"].sum())
    lengths = np.sort(part["bases"].to_numpy())[::-1]
    n50 = int(lengths[np.searchsorted(np.cumsum(lengths), bases / 2)]) if bases else 0
    return {
        "source": name,
        "contigs": len(part),
        "bases": bases,
        "shortest": int(lengths[-1]),
        "longest": int(lengths[0]),
        "n50": n50,
        "gc": int(part["gc"].sum()) / known if known else 0.0,
        "n": int(part["n"].sum()) / bases if bases else 0.0,
        "ambiguous": int(part["ambiguous"].sum()) / bases if bases else 0.0,
        "soft_masked": int(part["soft_masked"].sum()) / bases if bases else 0.0,
    }


def duplicate_contigs(contigs: pd.DataFrame) -> pd.DataFrame:
    """Contigs whose letters are exactly those of another (case ignored): columns source, contig, bases, same_as."""
    keyed = contigs[contigs["bases"] > 0]
    first = keyed.groupby(["content", "bases"], sort=False)
    label = keyed["source"] + "/" + keyed["contig"]
    same = label.groupby([keyed["content"], keyed["bases"]], sort=False).transform("first")
    later = first.cumcount() > 0
    return keyed.loc[later, ["source", "contig", "bases"]].assign(same_as=same[later]).reset_index(drop=True)


def write_report(
    path: str | os.PathLike[str], title: str, sources: pd.DataFrame, contigs: pd.DataFrame, duplicates: pd.DataFrame
) -> None:
    """An HTML page that needs nothing else: the tables, contig lengths and composition as bars."""
    target = Path(path)
    longest = contigs.nlargest(25, "bases")
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        "<h2>Sources</h2>",
        _table(sources),
        "<h2>Composition</h2><p>GC (of known bases), soft-masked, N and other ambiguity codes.</p>",
        _bars(sources),
        "<h2>Contig lengths</h2>",
        _histogram(contigs["bases"].to_numpy()),
        f"<h2>Longest contigs ({len(longest)} of {len(contigs):,})</h2>",
        _table(longest.drop(columns="content")),
        f"<h2>Duplicates: {len(duplicates):,} contigs equal an earlier one</h2>",
        _table(duplicates.head(100)) if len(duplicates) else "<p>None.</p>",
    ]
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}"
        "td:first-child,th:first-child{text-align:left}</style>" + "".join(parts) + "</html>\n"
    )
    with replacing(target) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _table(frame: pd.DataFrame) -> str:
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in frame.columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(value))}</td>" for value in row) + "</tr>"
        for row in frame.itertuples(index=False)
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value)


_COLOURS = {"gc": "#2a6f97", "soft_masked": "#e9c46a", "n": "#888888", "ambiguous": "#c1121f"}


def _bars(sources: pd.DataFrame) -> str:
    rows, height = [], 16
    for number, row in enumerate(sources.head(60).to_dict("records")):
        top = number * (height * len(_COLOURS) + 14)
        rows.append(f"<text x='0' y='{top + 12}' font-size='12'>{html.escape(str(row['source']))}</text>")
        for bar, (key, colour) in enumerate(_COLOURS.items()):
            y = top + bar * height
            rows.append(
                f"<rect x='330' y='{y}' width='{max(row[key] * 500, 0.5):.1f}' height='{height - 4}' fill='{colour}'/>"
                f"<text x='{336 + row[key] * 500:.0f}' y='{y + 11}' font-size='11'>{key} {row[key]:.2%}</text>"
            )
    total = min(len(sources), 60) * (height * len(_COLOURS) + 14)
    return f"<svg width='960' height='{total}' role='img' aria-label='composition'>{''.join(rows)}</svg>"


def _histogram(lengths: np.ndarray) -> str:
    positive = lengths[lengths > 0]
    if not len(positive):
        return "<p>No contig has a base.</p>"
    decades = np.floor(np.log10(positive) * 2) / 2
    values, counts = np.unique(decades, return_counts=True)
    rows = []
    for number, (value, count) in enumerate(zip(values, counts, strict=True)):
        low, high = int(10**value), int(10 ** (value + 0.5))
        width = 400 * count / counts.max()
        rows.append(
            f"<text x='0' y='{number * 20 + 13}' font-size='12'>{low:,} to {high:,}</text>"
            f"<rect x='230' y='{number * 20}' width='{width:.1f}' height='15' fill='#2a6f97'/>"
            f"<text x='{238 + width:.0f}' y='{number * 20 + 12}' font-size='11'>{count:,}</text>"
        )
    return f"<svg width='760' height='{len(values) * 20}' role='img' aria-label='contig lengths'>{''.join(rows)}</svg>"
