"""`metrics.csv` of a run: one row a step, whole after any interruption."""

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from genomoe.files import replacing


class MetricsCsv(Logger):
    """A Lightning logger that keeps one CSV file, columns growing as metrics appear, floats in full.

    Unlike Lightning's CSVLogger it continues the file of an interrupted run: `continue_from(step)` drops the
    rows after `step`, which the resumed run will write again.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._columns: list[str] = ["step"]
        self._rows: list[dict[str, str]] = []

    @property
    def name(self) -> str:
        """The file's stem."""
        return self.path.stem

    @property
    def version(self) -> str:
        """Always empty: a run directory holds one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder the file is in."""
        return str(self.path.parent)

    def continue_from(self, step: int) -> None:
        """Take over the rows of an existing file up to and including `step`."""
        if not self.path.exists():
            return
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            # A row cut short by a kill has a None among its values.
            rows = [row for row in reader if None not in row.values() and row["step"].isdigit()]
            self._columns = list(reader.fieldnames or ["step"])
        self._rows = [row for row in rows if int(row["step"]) <= step]
        self._rewrite()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add metrics to the row of `step`; a later call for the same step adds columns to it."""
        values = {key: repr(float(value)) for key, value in metrics.items()}
        if self._rows and self._rows[-1]["step"] == str(step):
            self._rows[-1].update(values)
            new_row = None
        else:
            new_row = {"step": str(step), **values}
            self._rows.append(new_row)
        new_columns = [key for key in values if key not in self._columns]
        self._columns += new_columns
        if new_columns or new_row is None or not self.path.exists():
            self._rewrite()
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self._columns, restval="").writerow(new_row)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the whole configuration is in config.yaml."""

    def _rewrite(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
