"""``best`` and ``last`` in a run directory: relative links to checkpoints, for people and scripts."""

from __future__ import annotations

import os

from determined_ds.checkpoints.files import Checkpoint, as_number, best_of, checkpoints_in
from determined_ds.documents.files import read_yaml
from determined_ds.errors import ConfigError
from determined_ds.rundir.handed_on import BEST, LAST
from determined_ds.rundir.metrics_file import read_records
from determined_ds.rundir.run_dir import CHECKPOINTS, PARTIAL_FILE, RunDir, short


def metric_of(run_dir: RunDir) -> tuple[str, bool]:
    """``searcher.metric`` of what was run, "" where there is none, and whether smaller values of it are better."""
    try:
        searcher = read_yaml(run_dir.experiment).data.get("searcher")
    except ConfigError:
        searcher = None
    searcher = searcher if isinstance(searcher, dict) else {}
    return str(searcher.get("metric") or ""), searcher.get("smaller_is_better") is not False


def best_checkpoint(run: RunDir) -> Checkpoint | None:
    """The checkpoint with the best validation of ``searcher.metric`` among those that a run has; None if unknown."""
    metric, smaller_is_better = metric_of(run)
    records = read_records(run.metrics, "validation") if metric else []
    values = {record["steps_completed"]: as_number(record["metrics"].get(metric)) for record in records}
    return best_of(checkpoints_in(run.checkpoints), values, smaller_is_better=smaller_is_better)


def relink(run: RunDir) -> None:
    """Have the links of a run name what is best and newest now; each is replaced in one call of the system."""
    kept = checkpoints_in(run.checkpoints)
    try:
        for name, found in ((BEST, best_checkpoint(run)), (LAST, kept[0] if kept else None)):
            link, aside = run.path / name, run.path / f".{name}{PARTIAL_FILE}"
            if link.exists() and not link.is_symlink():  # the user's own
                continue
            if found is None:
                link.unlink(missing_ok=True)
            elif not link.is_symlink() or os.readlink(link) != f"{CHECKPOINTS}/{found.uuid}":
                aside.unlink(missing_ok=True)
                aside.symlink_to(f"{CHECKPOINTS}/{found.uuid}", target_is_directory=True)
                aside.replace(link)
    except OSError as error:
        print(f"no links best and last in {short(run.path)}: {error.strerror or error}")
