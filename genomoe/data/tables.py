"""Labelled tables for fine-tuning: sequences or intervals with a label, as CSV, TSV, Parquet or BED.

Intervals are cut from a reference exactly as the training stream cuts its windows: on their strand, case kept, with N
beyond a contig's ends.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.genome.compression import open_stream, require_file
from genomoe.genome.coordinates import Interval
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.fasta import Reference
from genomoe.genome.sequence_files import resolve_path

BED_COLUMNS = ("contig", "start", "end", "name", "score", "strand")
ROLES = ("sequence", "contig", "start", "end", "strand", "label")
_TEXT = {"contig": str, "chrom": str, "chromosome": str}


@dataclass(frozen=True, kw_only=True)
class LabelledRows:
    """Rows of a table that have a sequence and a label, in the table's order."""

    letters: list[bytes]
    """What a model reads for each row."""
    labels: np.ndarray
    """[rows] the label column's values."""
    table: pd.DataFrame
    """The rows' other columns, index 0..n-1."""

    def __len__(self) -> int:
        return len(self.letters)

    def take(self, rows: Sequence[int] | np.ndarray) -> LabelledRows:
        """Some of the rows."""
        return LabelledRows(
            letters=[self.letters[row] for row in rows],
            labels=self.labels[np.asarray(rows, dtype=np.int64)],
            table=self.table.iloc[list(rows)].reset_index(drop=True),
        )


def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """A table by its name's end: .csv, .tsv, .txt (tabs), .bed or .parquet; text may be compressed.

    A BED file gets the columns contig, start, end, name, score, strand, as far as it has them.
    """
    file = require_file(resolve_path(path))
    name = file.name.lower()
    for ending in (".gz", ".bgz", ".xz", ".zst"):
        name = name.removesuffix(ending)
    try:
        if name.endswith(".parquet"):
            return pd.read_parquet(file)
        if name.endswith(".bed"):
            return _read_bed(file)
        if name.endswith((".csv", ".tsv", ".txt")):
            return pd.read_csv(file, sep="," if name.endswith(".csv") else "\t", dtype=_TEXT)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not readable as a table ({error}).") from None
    raise GenoMoEError(f"{file}: a table's name must end in .csv, .tsv, .txt, .bed or .parquet.")


def _read_bed(file: Path) -> pd.DataFrame:
    with open_stream(file) as stream:
        lines = [line for line in stream.read().splitlines() if not line.startswith((b"#", b"track", b"browser"))]
    frame = pd.read_csv(io.BytesIO(b"\n".join(lines)), sep="\t", header=None, dtype={0: str})
    if frame.shape[1] < 3:
        raise InputError(f"{file}: a BED line holds at least contig, start and end, separated by tabs.")
    names = [*BED_COLUMNS, *(f"column{number}" for number in range(7, frame.shape[1] + 1))]
    frame.columns = pd.Index(names[: frame.shape[1]])
    try:
        return frame.astype({"start": np.int64, "end": np.int64}).reset_index(drop=True)
    except ValueError:
        raise InputError(f"{file}: the second and third column of a BED file must be whole numbers.") from None


def read_labelled(
    path: str | os.PathLike[str],
    *,
    reference: str | os.PathLike[str] | Reference | None = None,
    columns: Mapping[str, str] | None = None,
    window: int | None = None,
    one_based: bool = False,
) -> LabelledRows:
    """Rows with their sequences.

    Args:
        path: the table (see read_table).
        reference: where intervals are cut from; not needed where the table has a sequence column.
        columns: role to column name where they differ; roles are sequence, or contig, start, end and strand, and
            label (in a BED file the label is the name column unless said otherwise).
        window: cut this many bases around each interval's centre instead of the interval itself.
        one_based: the table's coordinates are 1-based and inclusive rather than 0-based and half-open (a BED file
            is always the latter).

    Raises GenoMoEError, with the row (1 is the first after the header), for a missing column, an empty label, a
    letter that is no nucleotide code, an unknown contig or an interval beyond its end.
    """
    table = read_table(path)
    bed = ".bed" in Path(path).suffixes
    names = {role: role for role in ROLES} | ({"label": "name"} if bed else {}) | dict(columns or {})
    unknown = sorted(set(names) - set(ROLES))
    if unknown:
        raise GenoMoEError(f"No column role is called {unknown[0]!r}; roles are {', '.join(ROLES)}.")
    by_sequence = names["sequence"] in table.columns
    for role in ("label", *(("sequence",) if by_sequence else ("contig", "start", "end"))):
        if names[role] not in table.columns:
            raise GenoMoEError(
                f"{path} has no column {names[role]!r} for the {role}; it has {', '.join(map(str, table.columns))}."
            )
    empty = np.flatnonzero(table[names["label"]].isna())
    if len(empty):
        raise GenoMoEError(f"{path}, row {empty[0] + 1}: the label is empty; leave such rows out.")
    if by_sequence:
        letters = checked_sequences(str(path), table[names["sequence"]])
    else:
        if reference is None:
            raise GenoMoEError(f"{path} holds intervals; name the reference they lie on.")
        opened = reference if isinstance(reference, Reference) else Reference(reference)
        intervals = table_intervals(str(path), table, names, one_based=one_based and not bed)
        letters = interval_letters(str(path), intervals, opened, window)
    labels = table[names["label"]].to_numpy(copy=True)  # without a copy pandas makes it read-only, and torch warns
    return LabelledRows(letters=letters, labels=labels, table=table.reset_index(drop=True))


def checked_sequences(path: str, values: pd.Series) -> list[bytes]:
    """The sequences of a column, blanks at their ends removed."""
    tokenizer = NucleotideTokenizer()
    letters = []
    for row, value in enumerate(values.tolist(), 1):
        text = value.strip() if isinstance(value, str) else ""
        if not text:
            raise GenoMoEError(f"{path}, row {row}: the sequence is empty.")
        try:
            tokenizer.encode(text)
        except GenoMoEError as error:
            raise GenoMoEError(f"{path}, row {row}: {error}") from None
        letters.append(text.encode("ascii"))
    return letters


def table_intervals(path: str, table: pd.DataFrame, names: Mapping[str, str], *, one_based: bool) -> list[Interval]:
    """The interval of every row; a strand other than '-' counts as '+'."""
    strands = table[names["strand"]].tolist() if names["strand"] in table.columns else ["+"] * len(table)
    rows = zip(table[names["contig"]], table[names["start"]], table[names["end"]], strands, strict=True)
    intervals = []
    for row, (contig, start, end, strand) in enumerate(rows, 1):
        try:
            low, high = int(start) - one_based, int(end)
            if (low, high) != (float(start) - one_based, float(end)):
                raise ValueError
            intervals.append(Interval(str(contig), low, high, "-" if strand == "-" else "+"))
        except (TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, GenoMoEError) else f"{start!r} to {end!r} is no interval."
            raise GenoMoEError(f"{path}, row {row}: {reason}") from None
    return intervals


def interval_letters(
    path: str, intervals: Sequence[Interval], reference: Reference, window: int | None = None
) -> list[bytes]:
    """The letters of intervals, or of `window` bases around their centres (with N beyond the contig's ends)."""
    if window is not None and window < 1:
        raise GenoMoEError(f"window must be at least 1, got {window}.")
    letters = []
    for row, interval in enumerate(intervals, 1):
        try:
            if window is None:
                letters.append(reference.fetch(interval))
            else:
                reference.fetch(Interval(interval.contig, interval.start, interval.end))  # must lie on the contig
                letters.append(reference.fetch(interval.resized(window), pad=True))
        except GenoMoEError as error:
            raise GenoMoEError(f"{path}, row {row}: {error}") from None
        if not letters[-1]:
            raise GenoMoEError(f"{path}, row {row}: {interval} is empty.")
    return letters
