"""A labelled task: a table, which columns mean what, the sequences a model reads for each row, and its
splits.

A user adds a task with a YAML file in the group `task`; nothing here knows a particular one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from genomoe.data import tables
from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.genome.sequence_files import resolve_path
from genomoe.genome.variants import CentredWindow, ContigNames, check_alleles, haplotypes, normalise
from genomoe.training.options import ConfigError, Options

SPLITS = ("train", "validation", "test")
ROLES = ("sequence", "contig", "position", "ref", "alt", "start", "end", "strand", "label", "split", "group")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(Options):
    """What to learn and from what (config group `task`)."""

    name: str
    table: str
    """CSV, TSV (also gzip) or Parquet; `bundled:...` works. With `layout`, a file or folder in it."""
    layout: str | None = None
    """A published layout that is turned into the usual columns: see `genomoe.evaluation.benchmarks`."""
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Role to column name, where they differ. Roles: sequence, or contig, position, ref and alt, or contig, start,
    end (0-based, half-open) and strand; label; split; group.
    """
    kind: str = "regression"
    """regression or classification (labels are classes, any values)."""
    input: str = "sequence"
    """sequence: each row's own; interval: that of the reference, `window` bases around its centre; variant: the ALT
    window of the reference; pair: its REF and ALT windows.
    """
    reference: str | None = None
    """FASTA of variants, or of the place that sequences take (`locus`)."""
    locus: str | None = None
    """CONTIG:START-END:STRAND (from 1) that each sequence replaces, to be read in its surroundings."""
    flank: int = 0
    """Bases of the reference read on each side of a sequence."""
    window: int = 512
    """Bases around a variant or an interval's centre."""
    splits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """{train: NAME, validation: NAME, test: NAME} of the split column, or {by: contig, validation: [...],
    test: [...]}, or {by: random, validation: 0.1, test: 0.1}.
    """
    metric: str = "pearson"
    """Early stopping and the choice of the best epoch, on the validation split."""
    metrics: Sequence[str] = ("pearson", "spearman", "auroc")
    """Reported; auroc and auprc of a regression split its labels at their training median."""

    def __post_init__(self) -> None:
        self.require_choice("kind", ("regression", "classification"))
        self.require_choice("input", ("sequence", "interval", "variant", "pair"))
        self.require_count("flank", minimum=0)
        self.require_count("window", minimum=2)
        unknown = sorted(set(self.columns) - set(ROLES))
        self.require(not unknown, "columns", f"a mapping from {', '.join(ROLES)}")
        if self.input != "sequence" or self.locus is not None:
            self.require(self.reference is not None, "reference", "a FASTA file for variants, intervals or a locus")

    def column(self, role: str) -> str:
        return self.columns.get(role, role)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskInputs:
    """What is read for the rows of a table, in its order."""

    alt: list[bytes]
    """What is read, in upper case."""
    ref: list[bytes] | None
    """For input "pair": the same window without the variant, equally long."""
    rows: np.ndarray
    """Row of the table each came from."""
    dropped: Mapping[str, int]
    """Reason to number of table rows left out."""
    centre: slice
    """The part of each sequence that is the row's own: all of it but the flanks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskData(TaskInputs):
    """Rows that can be learnt from, with their labels and splits."""

    labels: np.ndarray
    """float64 values, or int64 class numbers."""
    classes: tuple[str, ...]
    """Names of the classes in order; empty for a regression."""
    split: np.ndarray
    """"train", "validation" or "test" for each row."""

    def where(self, split: str) -> np.ndarray:
        return np.flatnonzero(self.split == split)


def read_table(path: str) -> pd.DataFrame:
    """A table by its name's end: CSV, TSV, Parquet or BED."""
    file = resolve_path(path)
    if not file.is_file():
        raise GenoMoEError(f"There is no table {file}; task.table names it.")
    return tables.read_table(file)


def read_inputs(task: TaskConfig, table: pd.DataFrame) -> TaskInputs:
    """The sequences of a table's rows, for learning or for predicting.

    Rows whose variant has no sequence are left out and counted. Raises ConfigError if a column is missing,
    GenoMoEError if sequences of a locus differ in length from it.
    """
    needed = {"sequence": ["sequence"], "interval": ["contig", "start", "end"]}
    _need(task, table, needed.get(task.input, ["contig", "position", "ref", "alt"]))
    rows, centre = np.arange(len(table)), slice(None)
    dropped: Mapping[str, int] = {}
    ref: list[bytes] | None = None
    if task.input == "sequence":
        alt, centre = _sequences(task, table[task.column("sequence")].astype(str).tolist())
    elif task.input == "interval":
        assert task.reference is not None
        names = {role: task.column(role) for role in ROLES}
        intervals = tables.table_intervals(task.table, table, names, one_based=False)
        letters = tables.interval_letters(task.table, intervals, Reference(task.reference), task.window)
        alt = [text.upper() for text in letters]
    else:
        alt, ref, rows, dropped = _windows(task, table)
    return TaskInputs(alt=alt, ref=ref, rows=rows, dropped=dropped, centre=centre)


def _need(task: TaskConfig, table: pd.DataFrame, roles: Sequence[str]) -> None:
    for role in roles:
        if task.column(role) not in table.columns:
            raise ConfigError(
                f"task.columns.{role}: the table {task.table} has no column {task.column(role)}; it has "
                f"{', '.join(map(str, table.columns))}."
            )


def build_task(task: TaskConfig, table: pd.DataFrame, *, seed: int = 0) -> TaskData:
    """The sequences, labels and splits of a table; rows without a label are left out and counted.

    Raises what `read_inputs` raises, and ConfigError if a label column or a split is missing.
    """
    _need(task, table, ["label"])
    table = table.reset_index(drop=True)
    labelled = np.flatnonzero(table[task.column("label")].notna().to_numpy())
    inputs = read_inputs(task, table.iloc[labelled])
    rows, dropped = labelled[inputs.rows], dict(inputs.dropped)
    if len(labelled) < len(table):
        dropped["no label"] = len(table) - len(labelled)
    labels = table[task.column("label")].iloc[rows]
    classes: tuple[str, ...] = ()
    if task.kind == "classification":
        names = sorted(labels.unique().tolist())
        if len(names) < 2:
            raise ConfigError(f"task.kind=classification, but {task.table} has only the class {names}.")
        classes = tuple(str(name) for name in names)
        values = np.searchsorted(names, labels.to_numpy()).astype(np.int64)
    else:
        values = labels.to_numpy(dtype=np.float64)
    return TaskData(
        alt=inputs.alt,
        ref=inputs.ref,
        rows=rows,
        dropped=dropped,
        centre=inputs.centre,
        labels=values,
        classes=classes,
        split=_split(task, table.iloc[rows], seed),
    )


def _sequences(task: TaskConfig, texts: list[str]) -> tuple[list[bytes], slice]:
    sequences = [text.strip().upper().encode("ascii") for text in texts]
    if task.locus is None:
        return sequences, slice(None)
    assert task.reference is not None
    reference, locus = Reference(task.reference), Interval.parse(task.locus)
    length = len(locus)
    for number, sequence in enumerate(sequences):
        if len(sequence) != length:
            raise GenoMoEError(
                f"{task.table}, row {number + 1}: the sequence has {len(sequence)} bases, its locus {length}."
            )
    around = Interval(locus.contig, locus.start - task.flank, locus.end + task.flank)
    letters = reference.fetch(around, pad=True).upper()
    if locus.strand == "-":
        letters = reverse_complement(letters)
    before, after = letters[: task.flank], letters[task.flank + length :]
    return [before + sequence + after for sequence in sequences], slice(task.flank, task.flank + length)


def _windows(
    task: TaskConfig, table: pd.DataFrame
) -> tuple[list[bytes], list[bytes] | None, np.ndarray, dict[str, int]]:
    assert task.reference is not None
    reference = Reference(task.reference)
    names, rule = ContigNames(reference.contigs), CentredWindow(length=task.window)
    reasons: dict[str, int] = {}
    alt, ref, kept = [], [], []
    columns = (table[task.column(role)].tolist() for role in ("contig", "position", "ref", "alt"))
    for number, (contig, position, ref_allele, alt_allele) in enumerate(zip(*columns, strict=True)):
        pair = None
        status = str(check_alleles(str(ref_allele), str(alt_allele)))
        found = names.find(str(contig))
        if found is None:
            status = "unknown_contig"
        elif status == "ok":
            variant = Variant(found, int(position) - 1, str(ref_allele), str(alt_allele))
            try:
                reference.check_ref(variant)
                variant = normalise(variant, reference)
                window = rule.interval(variant, reference.contigs[found])
                pair = haplotypes(variant, window, reference)
            except GenoMoEError:
                status = "ref_mismatch or too long"
        if pair is None:
            reasons[status] = reasons.get(status, 0) + 1
            continue
        alt.append(pair.alt)
        ref.append(pair.ref)
        kept.append(number)
    if not kept:
        raise GenoMoEError(f"No variant of {task.table} fits {Path(task.reference).name}: {reasons}.")
    return alt, ref if task.input == "pair" else None, np.array(kept), reasons


def _split(task: TaskConfig, table: pd.DataFrame, seed: int) -> np.ndarray:
    how = dict(task.splits)
    by = how.pop("by", "column")
    if by == "column":
        column = task.column("split")
        if column not in table.columns:
            raise ConfigError(
                f"task.splits: {task.table} has no column {column}; name it in task.columns.split, or split "
                "by contig or at random (task.splits.by)."
            )
        names = {str(how.get(split, split)): split for split in SPLITS}
        split = np.array([names.get(str(value), "") for value in table[column]])
    elif by == "contig":
        contigs = table[task.column("contig")].astype(str)
        held = {str(contig): split for split in SPLITS[1:] for contig in how.get(split, ())}
        split = np.array([held.get(contig, "train") for contig in contigs])
    elif by == "random":
        draw = np.random.default_rng(seed).random(len(table))
        test, validation = float(how.get("test", 0.1)), float(how.get("validation", 0.1))
        split = np.where(draw < test, "test", np.where(draw < test + validation, "validation", "train"))
    else:
        raise ConfigError(f"task.splits.by={by} is not allowed: it must be one of column, contig, random.")
    for name in SPLITS:
        if not (split == name).any():
            raise ConfigError(f"task.splits: no row of {task.table} is in the {name} split.")
    return split
