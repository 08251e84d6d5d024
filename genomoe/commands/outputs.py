"""Tables to files by the name's end, written to a temporary name and renamed; progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pandas as pd
import pyarrow
from pyarrow import parquet

from genomoe.files import replacing
from genomoe.genome.errors import GenoMoEError


def check_ending(path: Path, *endings: str) -> None:
    """Raises GenoMoEError, before anything is computed, for another ending or a missing folder."""
    if not path.name.lower().endswith(endings):
        raise GenoMoEError(f"The output {path} must end in {', '.join(endings)}.")
    if not path.parent.is_dir():
        raise GenoMoEError(f"The folder of the output {path} does not exist: make it first.")


def write_table(table: pd.DataFrame, path: Path) -> None:
    """As .parquet, .csv or .tsv."""
    with table_writer(path) as append:
        append(table)


@contextmanager
def table_writer(path: Path) -> Iterator[Callable[[pd.DataFrame], None]]:
    """What appends tables of the same columns, at least one, to a .parquet (a row group each), .csv or .tsv file.

    The file appears when the block ends without error.
    """
    with replacing(path) as temporary, ExitStack() as stack:
        if path.name.lower().endswith(".parquet"):
            writer: parquet.ParquetWriter | None = None

            def append(table: pd.DataFrame) -> None:
                nonlocal writer
                rows = pyarrow.Table.from_pandas(table, preserve_index=False)
                if writer is None:
                    writer = stack.enter_context(parquet.ParquetWriter(temporary, rows.schema))
                writer.write_table(rows)

        else:
            file = stack.enter_context(open(temporary, "w", encoding="utf-8", newline=""))
            separator = "," if path.name.lower().endswith(".csv") else "\t"

            def append(table: pd.DataFrame) -> None:
                table.to_csv(file, sep=separator, index=False, header=not file.tell())

        yield append
        stack.close()
