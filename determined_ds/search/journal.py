"""``study.journal``, checked before Optuna reads it."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from determined_ds.errors import ConfigError, Problem

CREATE_STUDY = 0  # JournalOperation of Optuna 5.0.0's optuna/storages/journal/_storage.py
ANEW = "start again in another --run-dir, or restore the file"


def study_problem(path: Path, message: str, fix: str = ANEW) -> ConfigError:
    """The error of a study file that cannot be used."""
    return ConfigError(Problem(key="", origin=str(path), message=message, fix=fix, code="study"))


def fix_study_file(path: Path) -> int:
    """Check a study file line by line, and remove a partial last line that a killed search left.

    A search acts on a line only once it is whole on disk, so a partial line was never acted on.

    Args:
        path: The file; it is made where there is none. The caller holds the lock of its folder.

    Returns:
        How many lines it has; 0 where no study was begun.

    Raises:
        ConfigError: it is not an Optuna journal, is damaged, or cannot be opened.
    """
    for left in path.parent.glob(f"{path.name}.lock*"):  # of a search that was killed while it wrote
        with contextlib.suppress(OSError):
            left.unlink()
    try:
        path.touch()
        content = path.read_bytes()
    except OSError as error:
        fix = "give a --run-dir that can be written to"
        raise study_problem(path, f"cannot be opened: {error.strerror}", fix) from None
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].splitlines()
    for number, line in enumerate(lines, start=1):
        record = _record(line)
        if record is None and number == 1:
            raise study_problem(path, "is not a study file: its first line is not Optuna's")
        if record is None:
            raise study_problem(path, f"is damaged: line {number} of {len(lines)} is not what was written")
        if number == 1 and record["op_code"] != CREATE_STUDY:
            raise study_problem(path, "is damaged: it does not begin with a study")
    if not lines and content.strip(b"\0") and not b'{"op_code":0'.startswith(content[:12]):
        raise study_problem(path, "is not a study file: its first line is not Optuna's")
    if whole < len(content):
        os.truncate(path, whole)
    return len(lines)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("op_code"), int):
        return None
    return record if isinstance(record.get("worker_id"), str) else None
