"""Determined's core context without a cluster: the same calls, answered by files in a run directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined import core
from determined.common import storage

from determined_ds.runtime.metrics import jsonable, to_json_line

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"


class LocalTrainContext(core.DummyTrainContext):
    """Writes to ``metrics.jsonl`` what the master would be told.

    Args:
        run_dir: The run directory.
        metric: ``searcher.metric``: the validation metric that the best checkpoint is chosen by.
        smaller_is_better: Of that metric.
    """

    _trial_id = 0
    _exp_id = 0

    def __init__(self, run_dir: Path, *, metric: str = "", smaller_is_better: bool = True) -> None:
        tensorboard = run_dir / TENSORBOARD
        tensorboard.mkdir(parents=True, exist_ok=True)
        super().__init__(tensorboard_path=tensorboard)
        self.run_dir = run_dir
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._best: float | None = None

    def set_status(self, status: str) -> None:
        """Nobody watches a status here."""

    def report_progress(self, progress: float) -> None:
        """The terminal shows it."""

    def upload_tensorboard_files(self, *args: Any, **kwargs: Any) -> None:
        """They are where they belong."""

    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any = None
    ) -> None:
        self._write("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._write("validation", steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._write(group, steps_completed, metrics)

    def _write(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        record = {
            "group": group,
            "steps_completed": steps_completed,
            "metrics": jsonable(metrics),
            "time": round(time.time(), 3),
        }
        with (self.run_dir / METRICS).open("a") as file:
            file.write(to_json_line(record))
        if group == "validation":
            self._note_best(metrics)

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        value = metrics.get(self._metric)
        if isinstance(value, (int, float)):
            better = min if self._smaller_is_better else max
            self._best = value if self._best is None else better(self._best, value)

    def get_experiment_best_validation(self) -> float | None:
        return self._best


def local_core_context(
    run_dir: Path,
    distributed: core.DistributedContext,
    *,
    metric: str = "",
    smaller_is_better: bool = True,
) -> core.Context:
    """A core context whose checkpoints, metrics and TensorBoard files go to ``run_dir``."""
    checkpoints = run_dir / CHECKPOINTS
    checkpoints.mkdir(parents=True, exist_ok=True)
    return core.Context(
        distributed=distributed,
        checkpoint=core.DummyCheckpointContext(
            distributed, storage.SharedFSStorageManager(str(checkpoints))
        ),
        preempt=core.DummyPreemptContext(distributed, core.PreemptMode.WorkersAskChief),
        train=LocalTrainContext(run_dir, metric=metric, smaller_is_better=smaller_is_better),
        profiler=core.DummyProfilerContext(),
    )
