"""Scored variants out: VCF.gz, TSV and Parquet, written to a temporary name and renamed when complete.

A VCF keeps every input row, its order, header and samples, and gains two `Number=A` INFO fields; it is
tabix-indexed when the input was sorted. A table has one row for each input ALT. Memory stays flat: nothing
is held but a batch.
"""

from __future__ import annotations

import csv
import glob
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from genomoe.genome.errors import GenoMoEError
from genomoe.genome.variant_files import VCF_COLUMNS, InputRow, VariantSource

__all__ = ["OutputError", "VariantWriter", "open_output", "remove_leftovers"]

BATCH = 16384
TABIX_LIMIT = 2**29
Results = Sequence[tuple[float, str]]
"""Score (NaN if there is none) and status of every ALT of a row."""


class OutputError(GenoMoEError):
    """The scored file cannot be written as asked."""


class VariantWriter(Protocol):
    def write(self, row: InputRow, results: Results) -> None: ...

    def discard(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None: ...


def open_output(path: str | Path, source: VariantSource, *, key: str, description: str) -> VariantWriter:
    """A writer chosen by the name's end: .vcf.gz, .vcf, .tsv, .tsv.gz or .parquet.

    `key` names the INFO field (and `key`_STATUS beside it) or the table's column; `description` is its
    header text. Raises OutputError for another ending, a missing folder, or a key that the input already
    declares.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise OutputError(f"The folder of the output {path} does not exist: make it first.")
    name = path.name.lower()
    if name.endswith((".vcf.gz", ".vcf")):
        return _VCFWriter(path, source, key, description)
    if name.endswith((".tsv", ".tsv.gz", ".parquet")):
        return _TableWriter(path, source, key.lower())
    raise OutputError(f"The output {path} must end in .vcf.gz, .vcf, .tsv, .tsv.gz or .parquet.")


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def remove_leftovers(path: Path) -> None:
    """Removes what killed runs had written of an output; no run may be writing it now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        left.unlink(missing_ok=True)


class _Replacing:
    """Writes beside the target and renames at the end: a half-written file never has the final name."""

    def __init__(self, path: Path):
        self.path, self.temporary = path, temporary(path)
        self._discarded = False

    def __enter__(self) -> Self:
        return self

    def discard(self) -> None:
        """Nothing is to be written after all; the target stays as it was."""
        self._discarded = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        complete = kind is None and not self._discarded
        self._close(complete=complete)
        if not complete:
            self.temporary.unlink(missing_ok=True)

    def _close(self, complete: bool) -> None:
        raise NotImplementedError


class _VCFWriter(_Replacing):
    def __init__(self, path: Path, source: VariantSource, key: str, description: str):
        super().__init__(path)
        import pysam

        self._keys = (key, f"{key}_STATUS")
        self._from_table = source.kind == "table"
        self._compressed = path.name.lower().endswith(".gz")
        header = list(source.header) or ["##fileformat=VCFv4.3"]
        for name in self._keys:
            if any(line.startswith(f"##INFO=<ID={name},") for line in header):
                raise OutputError(f"{source.path} already declares INFO {name}: choose another name with --info-key.")
        quoted = description.replace("\\", "\\\\").replace('"', '\\"')
        header += [
            f'##INFO=<ID={key},Number=A,Type=Float,Description="{quoted}">',
            f'##INFO=<ID={key}_STATUS,Number=A,Type=String,Description="Status of {key} by ALT">',
        ]
        columns = VCF_COLUMNS if self._from_table else [*VCF_COLUMNS, *source.columns[8:]]
        if self._compressed:
            self._file: Any = pysam.BGZFile(str(self.temporary), "wb", None)
        else:
            self._file = open(self.temporary, "wb")  # noqa: SIM115 - closed in _close
        self._file.write(("\n".join(header) + "\n" + "\t".join(columns) + "\n").encode())
        self._last: tuple[str, int] | None = None
        self._seen: set[str] = set()
        self._sorted, self._end = True, 0

    def write(self, row: InputRow, results: Results) -> None:
        if self._from_table:
            fields = [
                row.contig,
                str(row.position + 1),
                row.id,
                row.ref or "N",
                ",".join(row.alts),
                ".",
                ".",
                ".",
            ]
        else:
            fields = list(row.fields)
        scores = ",".join("." if math.isnan(score) else f"{score:.7g}" for score, _ in results)
        statuses = ",".join(status for _, status in results)
        added = f"{self._keys[0]}={scores};{self._keys[1]}={statuses}"
        fields[7] = added if fields[7] in ("", ".") else f"{fields[7].rstrip(';')};{added}"
        self._file.write(("\t".join(fields) + "\n").encode())
        self._note_order(row)

    def _note_order(self, row: InputRow) -> None:
        if self._last is None or row.contig != self._last[0]:
            self._sorted &= row.contig not in self._seen
            self._seen.add(row.contig)
        else:
            self._sorted &= row.position >= self._last[1]
        self._last = (row.contig, row.position)
        self._end = max(self._end, row.position + len(row.ref))

    def _close(self, complete: bool) -> None:
        self._file.close()
        if not complete:
            return
        for suffix in (".tbi", ".csi"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        os.replace(self.temporary, self.path)
        if not self._compressed:
            return
        if not self._sorted:
            warnings.warn(
                f"{self.path} keeps its input's order, which is not sorted, so it has no index: "
                "bcftools sort makes one possible.",
                stacklevel=4,
            )
            return
        import pysam

        usual = pysam.set_verbosity(1)  # htslib warns of position 0, which VCF allows
        pysam.tabix_index(str(self.path), preset="vcf", force=True, csi=self._end >= TABIX_LIMIT)
        pysam.set_verbosity(usual)


class _TableWriter(_Replacing):
    """TSV and Parquet. From a VCF: row, contig, position (1-based), id, ref, alt; from a table: its own
    columns.
    """

    def __init__(self, path: Path, source: VariantSource, key: str):
        super().__init__(path)
        self._roles = source.roles
        keys = list(source.columns) if source.roles else ["row", "contig", "position", "id", "ref", "alt"]
        clash = {key, f"{key}_status"} & {str(name) for name in keys}
        if clash:
            raise OutputError(f"{source.path} already has a column {min(clash)}: choose another with --info-key.")
        self._names = [*keys, key, f"{key}_status"]
        self._rows: list[list[Any]] = []
        self._parquet = path.name.lower().endswith(".parquet")
        self._schema = self._make_schema(source) if self._parquet else None
        self._file = self._open()

    def write(self, row: InputRow, results: Results) -> None:
        for alt, (score, status) in zip(row.alts, results, strict=True):
            if self._roles:
                keys = list(row.fields)
                if len(row.alts) > 1:
                    keys[self._roles.alt] = alt
            else:
                keys = [row.number, row.contig, row.position + 1, row.id, row.ref, alt]
            self._rows.append([*keys, None if math.isnan(score) else score, status])
        if len(self._rows) >= BATCH:
            self._flush()

    def _make_schema(self, source: VariantSource) -> Any:
        import pyarrow

        if source.encoding == "parquet":
            import pyarrow.parquet as parquet

            fields = list(parquet.read_schema(source.path))
        else:
            numeric = {"row", "position"} if source.roles is None else set()
            fields = [
                pyarrow.field(name, pyarrow.int64() if name in numeric else pyarrow.string())
                for name in self._names[:-2]
            ]
        score, status = self._names[-2:]
        return pyarrow.schema(
            [*fields, pyarrow.field(score, pyarrow.float64()), pyarrow.field(status, pyarrow.string())]
        )

    def _open(self) -> Any:
        if self._parquet:
            import pyarrow.parquet as parquet

            return parquet.ParquetWriter(self.temporary, self._schema)
        import gzip

        opener = gzip.open if self.path.name.lower().endswith(".gz") else open
        file = opener(self.temporary, "wt", encoding="utf-8", newline="")
        csv.writer(file, delimiter="\t", lineterminator="\n").writerow(self._names)
        return file

    def _flush(self) -> None:
        if self._parquet and self._rows:
            import pyarrow

            assert self._schema is not None
            columns = [
                pyarrow.array(values, type=kind)
                for values, kind in zip(zip(*self._rows, strict=True), self._schema.types, strict=True)
            ]
            self._file.write_table(pyarrow.Table.from_arrays(columns, schema=self._schema))
        elif self._rows:
            writer = csv.writer(self._file, delimiter="\t", lineterminator="\n")
            for values in self._rows:
                *keys, score, status = values
                writer.writerow([*keys, "" if score is None else f"{score:.7g}", status])
        self._rows = []

    def _close(self, complete: bool) -> None:
        if complete:
            self._flush()
        self._file.close()
        if complete:
            os.replace(self.temporary, self.path)
