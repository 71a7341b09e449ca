"""Run directories as paths: their names, and whether they can be written to."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from determined_ds.errors import ConfigError, Problem
from determined_ds.protocol.run_dir import short
from determined_ds.protocol.run_lock import LOCK, check_not_held

RUNS = Path("runs")
WRITABLE = "give a --run-dir that can be written to"


def slug(name: str) -> str:
    """An experiment's name as that of a folder."""
    return "".join(char if char.isalnum() or char in "-_." else "-" for char in name).strip(".") or "run"


def new_run_dir(folder: Path, now: datetime) -> Path:
    """A folder named for the time, that is not there yet: two runs may start in the same second."""
    stem = now.strftime("%Y%m%d-%H%M%S")
    path, number = folder / stem, 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}"
    return path


def check_run_dir(run_dir: Path) -> None:
    """Refuse a run directory that cannot be written to, or that another process writes to."""
    there = run_dir.resolve()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(run_dir_problem(run_dir, f"{short(there)} is a file, not a folder", WRITABLE))
    if not os.access(there, os.W_OK | os.X_OK):
        message = f"no permission to write in {short(there)}"
        raise ConfigError(run_dir_problem(run_dir, message, WRITABLE))
    check_not_held(run_dir)


def is_empty(run_dir: Path) -> bool:
    """Whether no run was ever begun in it: it is not there, or holds at most what a lock leaves behind."""
    return not run_dir.exists() or (run_dir.is_dir() and all(path.name == LOCK for path in run_dir.iterdir()))


def run_dir_problem(run_dir: Path, message: str, fix: str) -> Problem:
    """The problem of a run directory."""
    return Problem(key="--run-dir", value=short(run_dir), message=message, fix=fix, code="run-dir")


def count(number: int, thing: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
