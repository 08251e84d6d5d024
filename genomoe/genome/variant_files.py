"""Variant files in: VCF and BCF (plain, gzip, bgzip), TSV, CSV and Parquet, one row at a time.

Text VCF is read as text, so that every row, header line, sample column and odd INFO field can be written
back as it came; BCF goes through htslib's own conversion to text. Positions are 1-based in every file,
0-based in `InputRow`. What is wrong with a file is an error with its line; what is wrong with one variant is
that row's status, later.
"""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from genomoe.genome.compression import BGZF_END, require_file
from genomoe.genome.errors import GenoMoEError

__all__ = ["InputRow", "TableColumns", "VariantFileError", "VariantSource", "open_variants", "sort_key"]

VCF_COLUMNS = ["#CHROM", "POS", "ID", "REF", "ALT", "QUAL", "FILTER", "INFO"]
COLUMN_NAMES = {
    "contig": ("contig", "chrom", "#chrom", "chr", "chromosome", "seqname", "#chr"),
    "position": ("position", "pos", "start_1based"),
    "ref": ("ref", "reference", "ref_allele", "reference_allele"),
    "alt": ("alt", "alternate", "alt_allele", "alternative", "alternate_allele"),
    "id": ("id", "variant_id", "rsid", "name"),
}


class VariantFileError(GenoMoEError):
    """A variant file that cannot be read; the message holds the file, the line or record and what to do."""


@dataclass(frozen=True, kw_only=True)
class InputRow:
    """One row of a variant file: a site with all its ALT alleles."""

    number: int
    """Line of a text file, record of a BCF or Parquet file; from 1."""
    contig: str
    position: int
    """0-based; -1 stands for the position 0 (telomere) that VCF allows."""
    id: str
    ref: str
    alts: tuple[str, ...]
    fields: tuple[Any, ...]
    """The row as it came: the columns of a VCF line (text) or of a table."""


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """Which column of a table holds what, by index; ALT may hold several alleles with commas between."""

    contig: int
    position: int
    ref: int
    alt: int
    id: int | None

    @classmethod
    def find(cls, names: Sequence[str], path: Path, given: Mapping[str, str] | None = None) -> TableColumns:
        """Finds the columns in any order by their usual names, or by the names in `given`."""
        lower = [str(name).strip().lower() for name in names]
        found: dict[str, int | None] = {}
        for role, usual in COLUMN_NAMES.items():
            wanted = (given[role].lower(),) if given and role in given else usual
            found[role] = next((lower.index(name) for name in wanted if name in lower), None)
            if found[role] is None and role != "id":
                raise VariantFileError(
                    f"{path}, header: no column for {role} (looked for {', '.join(wanted)}); "
                    f"the columns are {', '.join(map(str, names)) or 'none'}."
                )
        return cls(**found)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class VariantSource:
    """An opened variant file: what kind it is, its header, and its rows, to be read once or several times."""

    path: Path
    kind: str
    """"vcf" (also BCF) or "table"."""
    header: tuple[str, ...]
    """The `##` lines of a VCF; empty for a table."""
    columns: tuple[str, ...]
    """The column names: `#CHROM` ... of a VCF, the header of a table."""
    roles: TableColumns | None = field(repr=False, default=None)
    encoding: str = "text"
    """"text", "bcf" or "parquet"."""

    def rows(self) -> Iterator[InputRow]:
        """The rows in file order; VariantFileError with the line at the first that is not a variant."""
        if self.encoding == "bcf":
            yield from _bcf_rows(self.path)
        elif self.encoding == "parquet":
            yield from self._parquet_rows()
        elif self.kind == "vcf":
            for number, line in _text_lines(self.path):
                if line and not line.startswith("#"):
                    yield _vcf_row(self.path, number, line)
        else:
            yield from self._text_table_rows()

    def _text_table_rows(self) -> Iterator[InputRow]:
        lines = _text_lines(self.path)
        number = 0

        def only_text() -> Iterator[str]:
            nonlocal number
            for number, line in lines:  # noqa: B007 - `number` is read by the consumer below
                if line and not line.startswith("##"):
                    yield line

        reader = csv.reader(only_text(), delimiter=_delimiter(self.path))
        next(reader)
        for values in reader:
            if len(values) != len(self.columns):
                raise VariantFileError(
                    f"{self.path}, line {number}: {len(values)} columns, the header has {len(self.columns)}."
                )
            yield self._table_row(number, values)

    def _parquet_rows(self) -> Iterator[InputRow]:
        import pyarrow.parquet as parquet

        number = 0
        with parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=8192):
                for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    number += 1
                    yield self._table_row(number, values)

    def _table_row(self, number: int, values: Sequence[Any]) -> InputRow:
        roles = self.roles
        assert roles is not None
        text = ["" if value is None else str(value).strip() for value in values]
        position = _position(self.path, number, text[roles.position])
        alts = tuple(alt.strip() for alt in text[roles.alt].split(","))
        name = text[roles.id] if roles.id is not None else "."
        return InputRow(
            number=number,
            contig=text[roles.contig],
            position=position,
            id=name or ".",
            ref=text[roles.ref],
            alts=alts,
            fields=tuple(values),
        )


def open_variants(path: str | os.PathLike[str], columns: Mapping[str, str] | None = None) -> VariantSource:
    """Looks at a variant file and returns a source of its rows; the format is told by content, then by the
    name.

    `columns` names the columns of a table for the roles contig, position, ref, alt and id where they differ
    from the usual names.
    """
    path = require_file(path)
    if path.stat().st_size == 0:
        raise VariantFileError(f"{path} is empty; a variant file needs at least a header.")
    with _open_bytes(path) as stream:
        start = _guard(path, 0, lambda: stream.read(5))
    if start[:3] == b"BCF":
        return _open_bcf(path)
    if start[:4] == b"PAR1":
        return _open_parquet(path, columns)
    names = path.name.lower()
    if any(names.endswith(end) or names.endswith(end + ".gz") for end in (".tsv", ".csv", ".txt", ".tab")):
        return _open_text_table(path, columns)
    return _open_vcf(path)


def sort_key(row: InputRow) -> tuple[str, int]:
    """What an index needs sorted: one stretch a contig, positions ascending within."""
    return row.contig, row.position


def _open_vcf(path: Path) -> VariantSource:
    meta: list[str] = []
    for number, line in _text_lines(path):
        if line.startswith("##"):
            meta.append(line)
        elif line.startswith("#"):
            names = line.split("\t")
            if len(names) < 5 and len(line.split()) >= 5:
                raise VariantFileError(f"{path}, line {number}: the columns are separated by spaces; VCF needs tabs.")
            if names[:5] != VCF_COLUMNS[:5]:
                raise VariantFileError(
                    f"{path}, line {number}: the header line starts with {' '.join(names[:5])!r} instead of "
                    f"{' '.join(VCF_COLUMNS[:5])!r}; if this is a table, name it .tsv or .csv."
                )
            return VariantSource(path=path, kind="vcf", header=tuple(meta), columns=tuple(names))
        elif line:
            row = _vcf_row(path, number, line)  # a file without a header: accepted when its rows are VCF's
            extra = [f"COLUMN{index}" for index in range(9, len(row.fields) + 1)]
            return VariantSource(path=path, kind="vcf", header=tuple(meta), columns=(*VCF_COLUMNS, *extra))
    if not meta:
        raise VariantFileError(f"{path} holds neither a header nor a variant.")
    return VariantSource(path=path, kind="vcf", header=tuple(meta), columns=tuple(VCF_COLUMNS))


def _open_bcf(path: Path) -> VariantSource:
    import pysam

    try:
        with pysam.VariantFile(str(path)) as file:
            lines = str(file.header).rstrip("\n").split("\n")
    except (OSError, ValueError) as error:
        raise VariantFileError(f"{path} is not a readable BCF file: {error}.") from error
    meta = tuple(line for line in lines if line.startswith("##"))
    names = next(line for line in lines if line.startswith("#CHROM"))
    return VariantSource(path=path, kind="vcf", header=meta, columns=tuple(names.split("\t")), encoding="bcf")


def _open_text_table(path: Path, given: Mapping[str, str] | None) -> VariantSource:
    for _, line in _text_lines(path):
        if line and not line.startswith("##"):
            names = next(csv.reader([line], delimiter=_delimiter(path)))
            roles = TableColumns.find(names, path, given)
            return VariantSource(path=path, kind="table", header=(), columns=tuple(names), roles=roles)
    raise VariantFileError(f"{path} has no header line.")


def _open_parquet(path: Path, given: Mapping[str, str] | None) -> VariantSource:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        names = parquet.read_schema(path).names
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise VariantFileError(f"{path} is not a readable Parquet file: {error}.") from error
    roles = TableColumns.find(names, path, given)
    return VariantSource(path=path, kind="table", header=(), columns=tuple(names), roles=roles, encoding="parquet")


def _bcf_rows(path: Path) -> Iterator[InputRow]:
    import pysam

    number = 0
    try:
        with pysam.VariantFile(str(path)) as file:
            for record in file:
                number += 1
                yield _vcf_row(path, number, str(record).rstrip("\n"))
    except OSError as error:
        raise VariantFileError(f"{path}, record {number + 1}: the file is truncated or damaged: {error}.") from error


def _vcf_row(path: Path, number: int, line: str) -> InputRow:
    fields = line.split("\t")
    if len(fields) < 5:
        hint = "are they separated by spaces instead of tabs?" if len(line.split()) >= 5 else "is the line cut off?"
        raise VariantFileError(f"{path}, line {number}: {len(fields)} columns, a variant needs at least 5; {hint}")
    fields += ["."] * (8 - len(fields))
    return InputRow(
        number=number,
        contig=fields[0],
        position=_position(path, number, fields[1]),
        id=fields[2],
        ref=fields[3],
        alts=tuple(fields[4].split(",")),
        fields=tuple(fields),
    )


def _position(path: Path, number: int, text: str) -> int:
    try:
        position = int(text)
    except ValueError:
        try:
            position = int(float(text)) if float(text) == int(float(text)) else -1
        except (ValueError, OverflowError):
            position = -1
        if position < 0:
            raise VariantFileError(
                f"{path}, line {number}: the position is {text!r}; it must be a whole number, first base 1."
            ) from None
    return position - 1


def _delimiter(path: Path) -> str:
    return "," if ".csv" in path.name.lower() else "\t"


def _open_bytes(path: Path) -> BinaryIO:
    with open(path, "rb") as plain:
        magic = plain.read(18)
        if magic[:2] != b"\x1f\x8b":
            return open(path, "rb")
        if magic[12:14] == b"BC":
            plain.seek(-len(BGZF_END), 2)
            if plain.read() != BGZF_END:
                raise VariantFileError(
                    f"{path} lacks bgzip's end marker: the file is truncated; copy or write it again."
                )
    return gzip.open(path, "rb")  # type: ignore[return-value]


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without their ends, whether LF or CRLF; blank lines are empty."""
    with _open_bytes(path) as stream:
        number = 0
        while True:
            line = _guard(path, number, stream.readline)
            if not line:
                return
            number += 1
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                text = line.decode("latin-1")
            yield number, text.rstrip("\r\n")


def _guard(path: Path, number: int, read: Any) -> bytes:
    try:
        return read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise VariantFileError(
            f"{path}, after line {number}: the compressed file is truncated or damaged ({error})."
        ) from error
