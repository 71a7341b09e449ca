"""A CSV file: a line a report, a column a metric."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined_ds.documents.writing import write_whole
from determined_ds.runtime.logs.messages import NumbersAt, ShownRun

STEP, TIME = "batches", "time"


class CsvFile:
    """The file, in the run directory. On a cluster each start of the trial has its own, uploaded as TensorBoard's are.

    What is after the batch that a resumed run continues from is cut off: it is trained, and written, again.

    Args:
        about: The run.
        options: None.
    """

    def __init__(self, about: ShownRun, options: Mapping[str, Any]) -> None:
        self._path = Path(about.folder) / about.csv
        self._about = about
        self._continues = about.continues
        self._columns = [STEP, TIME]

    def begin(self) -> str:
        """Read the columns of a run that continues."""
        rows = self._rows() if self._continues is not None else []
        self._columns = list(rows[0]) if rows else [STEP, TIME]
        kept = [row for row in rows if float(row[STEP]) <= (self._continues or 0)]
        self._write_all(kept)
        return self._about.later(str(self._path))

    def report(self, reports: list[NumbersAt]) -> None:
        """Append lines; a metric that is new gives all lines a column."""
        found = {name: None for report in reports for name in report.metrics}
        new = [name for name in found if name not in self._columns]
        if new:
            rows = self._rows()
            self._columns += new
            self._write_all(rows)
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            for report in reports:
                writer.writerow({STEP: report.step, TIME: report.time, **report.metrics})

    def end(self, status: str) -> None:
        """Nothing: the file is closed after each report."""

    def _rows(self) -> list[dict[str, Any]]:
        if not self._path.is_file():
            return []
        with self._path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if row.get(STEP)]

    def _write_all(self, rows: list[dict[str, Any]]) -> None:
        lines = [",".join(_quoted(name) for name in self._columns)]
        lines += [",".join(_quoted(row.get(name) or "") for name in self._columns) for row in rows]
        write_whole(self._path, "".join(f"{line}\n" for line in lines))


def _quoted(value: str) -> str:
    return '"' + value.replace('"', '""') + '"' if any(sign in value for sign in ',"\n\r') else value
