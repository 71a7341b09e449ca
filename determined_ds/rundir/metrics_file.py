"""``metrics.jsonl``: its one writer and its one reader.

A line is appended by one call of the system, so that whatever ends a run can tear only the last one. Numbers that JSON
lacks are written as ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, and read as floats.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NOT_FINITE = ("NaN", "Infinity", "-Infinity")
Record = dict[str, Any]


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record as one line of strict JSON."""
    rest = (json.dumps(jsonable(record), allow_nan=False) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        while rest:  # the part that a full disk refused is written, or fails, at the second try
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def jsonable(value: Any) -> Any:
    """A metric as strict JSON can hold it: tensors and numpy scalars as numbers, non-finite ones as words."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def read_records(path: Path, group: str | None = None) -> list[Record]:
    """The records of a file, of one group or all, without torn lines; none if there is no file."""
    return [record for record in MetricsReader(path).new_records() if group in (None, record["group"])]


class MetricsReader:
    """Reads a file that a run is still writing, or will."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.began_anew = False  # what the last call returned is all of a file that replaced the one before
        self._read_to = 0
        self._inode: int | None = None  # a run that resumes replaces the file

    def new_records(self) -> list[Record]:
        """The records that were written since the last call; all of them where the run went back to a checkpoint."""
        self.began_anew = False
        try:
            there = self._path.stat()
            if self._inode not in (None, there.st_ino) or there.st_size < self._read_to:
                self._read_to, self.began_anew = 0, True
            self._inode = there.st_ino
            if there.st_size == self._read_to:
                return []
            with self._path.open("rb") as file:
                file.seek(self._read_to)
                lines = [line for line in file if line.endswith(b"\n")]
        except OSError:
            return []
        self._read_to += sum(map(len, lines))
        return [record for _, record in _parsed(line.decode(errors="replace") for line in lines)]


def kept_until(path: Path, steps: int) -> str | None:
    """The lines up to a batch, which a checkpoint holds: those after it will be trained again. None: all of them."""
    text = path.read_text(errors="replace") if path.exists() else ""
    parsed = _parsed(text.splitlines(keepends=True))
    kept = "".join(f"{line.rstrip()}\n" for line, record in parsed if record["steps_completed"] <= steps)
    return None if kept == text else kept


def _parsed(lines: Iterable[str]) -> list[tuple[str, Record]]:
    """The lines that hold a record, each with it."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("steps_completed"), int):
                record = {"group": "", "metrics": {}, **record}
                has_words = 'NaN"' in line or 'Infinity"' in line  # of all lines, hardly any has
                found.append((line, _with_numbers(record) if has_words else record))
    return found


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and value in NOT_FINITE else value
