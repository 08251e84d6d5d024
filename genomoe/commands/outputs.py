"""Tables to files by the name's end, written to a temporary name and renamed; progress on stderr."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

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
    with replacing(path) as temporary:
        if path.name.lower().endswith(".parquet"):
            table.to_parquet(temporary, index=False)
        else:
            table.to_csv(temporary, sep="," if path.name.lower().endswith(".csv") else "\t", index=False)
