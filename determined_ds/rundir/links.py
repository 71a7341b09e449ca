"""``best`` and ``last`` in a run directory: relative links to checkpoints, for people and scripts."""

from __future__ import annotations

import os
from collections.abc import Callable

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.checkpoints.retention import as_number, best_of
from determined_ds.documents.files import read_yaml
from determined_ds.errors import ConfigError
from determined_ds.rundir.handed_on import BEST, LAST
from determined_ds.rundir.metrics_file import MetricsReader
from determined_ds.rundir.run_dir import CHECKPOINTS, PARTIAL_FILE, RunDir, short


def relink(run_dir: RunDir) -> None:
    """Have the links of a run name what is best and newest now, by the metric of its ``experiment.yaml``."""
    if run_dir.checkpoints.is_dir():
        metric, smaller_is_better = metric_of(run_dir)
        Links(run_dir, metric=metric, smaller_is_better=smaller_is_better).update()


def metric_of(run_dir: RunDir) -> tuple[str, bool]:
    """``searcher.metric`` of what was run, "" where there is none, and whether smaller values of it are better."""
    try:
        searcher = read_yaml(run_dir.experiment).data.get("searcher")
    except ConfigError:
        searcher = None
    searcher = searcher if isinstance(searcher, dict) else {}
    return str(searcher.get("metric") or ""), searcher.get("smaller_is_better") is not False


class Links:
    """The links of a run. A link is replaced in one call of the system, so that there always is one.

    Args:
        run_dir: The run directory.
        metric: ``searcher.metric``; "" where nothing is best.
        smaller_is_better: Of that metric.
        note: Shows a line to the user.
    """

    def __init__(
        self, run_dir: RunDir, *, metric: str, smaller_is_better: bool, note: Callable[[str], None] = print
    ) -> None:
        self._there = run_dir
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._note = note
        self._reader = MetricsReader(run_dir.metrics)
        self._validations: dict[int, float | None] = {}  # by batch
        self._failed = False

    def update(self) -> None:
        """Have the links name what is best and newest now; those of what is gone are removed."""
        for record in self._reader.new_records():
            if record["group"] == "validation":
                self._validations[record["steps_completed"]] = as_number(record["metrics"].get(self._metric))
        kept = [found for found in checkpoints_in(self._there.checkpoints) if found.steps_completed >= 0]
        best = best_of(kept, self._validations, smaller_is_better=self._smaller_is_better)
        try:
            self._set(BEST, best.uuid if best else None)
            self._set(LAST, kept[0].uuid if kept else None)
        except OSError as error:
            if not self._failed:
                where = short(self._there.path)
                self._note(f"no links best and last in {where}: {error.strerror or error}")
            self._failed = True

    def _set(self, name: str, uuid: str | None) -> None:
        link = self._there.path / name
        if link.exists() and not link.is_symlink():  # the user's own
            return
        if uuid is None:
            link.unlink(missing_ok=True)
            return
        target = f"{CHECKPOINTS}/{uuid}"
        if link.is_symlink() and os.readlink(link) == target:
            return
        aside = self._there.path / f".{name}{PARTIAL_FILE}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(target, target_is_directory=True)
        aside.replace(link)
