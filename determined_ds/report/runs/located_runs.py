"""Which run directories a folder means: its own, or those of a search, of a comparison, of several runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from determined_ds.errors import ConfigError, Problem
from determined_ds.report.runs.run_view import RunView, labels
from determined_ds.rundir.records import KeptWarning, is_run, read_run, read_warnings
from determined_ds.rundir.run_dir import RunDir, short

# Of det-ds search; of compare and autotune; of runs that lie in one folder.
WITHIN = ("trials/*", "runs/*/*", "*")
FIX = (
    "name a folder that det-ds run, search, compare or autotune has made (--run-dir, or one of runs/*/*), or one "
    "that holds such folders"
)


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The run directories among folders and within them, in their order, each once.

    Raises:
        ConfigError: folders that hold no run; each of them.
    """
    found: dict[Path, None] = {}
    problems = []
    for folder in folders:
        runs = _runs_of(folder)
        found.update(dict.fromkeys(runs))
        if not runs:
            message = (
                "holds no run"
                if folder.is_dir()
                else "is not a folder"
                if folder.exists()
                else "does not exist"
            )
            problems.append(
                Problem(key="RUN_DIR", value=str(folder), message=message, fix=FIX, code="run-dir")
            )
    if problems:
        raise ConfigError(problems)
    return list(found)


def _runs_of(folder: Path) -> list[Path]:
    """Those within it come first: a search's own folder looks like that of a run."""
    if not folder.is_dir():
        return []
    for pattern in WITHIN[:2]:
        runs = sorted(path for path in folder.glob(pattern) if is_run(path))
        if runs:
            return runs
    return [folder] if is_run(folder) else sorted(path for path in folder.glob(WITHIN[2]) if is_run(path))


def read_runs(paths: Sequence[Path]) -> list[RunView]:
    """Read run directories for a page.

    Raises:
        ConfigError: one of them is not a run directory (any longer).
    """
    return [read_one(path, label) for path, label in zip(paths, labels(paths), strict=True)]


def read_one(path: Path, label: str) -> RunView:
    """Read a run directory under a name.

    Raises:
        ConfigError: it is not a run directory.
    """
    run = read_run(path)
    damaged = (KeptWarning(message=message, source="det-ds") for message in run.damaged)
    warnings = (*damaged, *read_warnings(RunDir(path)))
    return RunView(run=run, label=label, warnings=warnings, place=short(path.resolve()))
