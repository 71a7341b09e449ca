"""Determined's core context without a cluster: the same calls, answered by files in a run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined import core
from determined.common import storage

from determined_ds.protocol.best import finite, is_better
from determined_ds.protocol.checkpoint_files import (
    PARTIAL,
    checkpoints_in,
    damage_of,
    remove_partial,
    sync_to_disk,
)
from determined_ds.protocol.metrics_file import append_record, jsonable, put_on_disk, read_records
from determined_ds.protocol.run_dir import RunDir, make_private
from determined_ds.protocol.signals import STOP
from determined_ds.protocol.stored_elsewhere import StoredElsewhere
from determined_ds.runtime.system_metrics import LocalProfiler

if TYPE_CHECKING:
    from determined_ds.runtime.master.unmanaged import MasterReport


class LocalTrainContext(core.DummyTrainContext):
    """Writes to ``metrics.jsonl`` what the master would be told.

    Args:
        run_dir: The run directory.
        metric: ``searcher.metric``: the validation metric that the best checkpoint is chosen by.
        smaller_is_better: Of that metric.
        report: Who tells a master the same; None where nobody does.
    """

    _trial_id = 0
    _exp_id = 0

    def __init__(
        self,
        run_dir: Path,
        *,
        metric: str = "",
        smaller_is_better: bool = True,
        report: MasterReport | None = None,
    ) -> None:
        self._there = RunDir(run_dir)
        tensorboard = self._there.tensorboard
        make_private(tensorboard)
        super().__init__(tensorboard_path=tensorboard)
        self.run_dir = run_dir
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._report = report
        self._best: float | None = None
        self._remember_best()

    def _remember_best(self) -> None:
        """The best validation of the batches trained before, where a run is resumed."""
        for record in read_records(self._there.current(self._there.metrics), "validation"):
            self._note_best(record["metrics"])

    def set_status(self, status: str) -> None:
        """Nobody watches a status here."""

    def report_progress(self, progress: float) -> None:
        """The terminal shows it."""
        if self._report is not None:
            self._report.progress(progress)

    def upload_tensorboard_files(self, *args: Any, **kwargs: Any) -> None:
        """They are where they belong."""

    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any = None
    ) -> None:
        self.report_metrics("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.report_metrics("validation", steps_completed, metrics)
        self._note_best(metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        record = {
            "group": group,
            "steps_completed": steps_completed,
            "metrics": jsonable(metrics),
            "time": round(time.time(), 3),
        }
        append_record(self._there.metrics, record)
        if self._report is not None:
            self._report.metrics(group, steps_completed, jsonable(metrics))

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        value = finite(metrics.get(self._metric))
        if is_better(value, self._best, smaller_is_better=self._smaller_is_better):
            self._best = value

    def get_experiment_best_validation(self) -> float | None:
        return self._best


class AtomicStorage(storage.SharedFSStorageManager):
    """Checkpoints that are either whole or not there: written aside, put on the disk, then renamed.

    Args:
        base_path: The folder of the checkpoints.
        metrics: The file of the metrics, which a checkpoint counts on: it goes on from there, and reports no batch
            before it again.
        is_chief: Whether this is rank 0, which puts a checkpoint in its place.
    """

    def __init__(self, base_path: str, metrics: Path, *, is_chief: bool = True) -> None:
        super().__init__(base_path)
        self.folder = Path(base_path)
        self._metrics = metrics
        self._is_chief = is_chief

    def store_path_is_direct_access(self) -> bool:
        """No: what is written becomes the checkpoint in :meth:`post_store_path`."""
        return False

    def _aside(self, uuid: str) -> Path:
        return self.folder / f".{uuid}{PARTIAL}"

    def pre_store_path(self, dst: str) -> Path:
        path = self._aside(dst)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def post_store_path(self, src: str | os.PathLike[str], dst: str, paths: Any = None) -> None:
        """The folder becomes the checkpoint, once all ranks have written.

        Determined has the first rank of each machine do it: it goes by the device's number, and that of a network
        file system is each machine's own. Source: ``_store_path_sharded`` in determined 0.38.1's
        ``core/_checkpoint.py``.
        """
        if not self._is_chief:
            return
        put_on_disk(self._metrics)
        sync_to_disk_folder(self._metrics.parent)
        sync_to_disk(Path(src))
        os.rename(src, self.folder / dst)
        sync_to_disk_folder(self.folder)

    def damaged(self, *, besides: Sequence[str]) -> list[str]:
        """Uuids of the checkpoints that are not what was written, the oldest first.

        Args:
            besides: Uuids that are not looked at.
        """
        there = [found for found in checkpoints_in(self.folder) if found.uuid not in besides]
        return [found.uuid for found in reversed(there) if damage_of(found.path) is not None]


def sync_to_disk_folder(path: Path) -> None:
    """Put a folder's own entries on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalCheckpointContext(core.DummyCheckpointContext):
    """Checkpoints in the run directory, which a master may hear of.

    Args:
        distributed: The ranks.
        storage_manager: Where they are.
        report: Who tells a master; None where nobody does.
    """

    def __init__(
        self,
        distributed: core.DistributedContext,
        storage_manager: storage.StorageManager,
        report: MasterReport | None,
    ) -> None:
        super().__init__(distributed, storage_manager)
        self._report = report

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:
        if self._report is not None:
            self._report.checkpoint(storage_id, resources, metadata)

    def _report_checkpoint_deleted(self, storage_id: str, resources: Any = None) -> None:
        if self._report is not None:
            self._report.deleted(storage_id, resources)


class SignalPreemptContext(core.DummyPreemptContext):
    """Preemption by SIGTERM."""

    def __init__(self, distributed: core.DistributedContext) -> None:
        super().__init__(distributed, core.PreemptMode.ChiefOnly)

    def should_preempt(self, auto_ack: bool = True) -> bool:
        return STOP.is_set()


def local_core_context(
    run_dir: Path,
    distributed: core.DistributedContext,
    *,
    metric: str = "",
    smaller_is_better: bool = True,
    storage_config: Mapping[str, Any] | None = None,
    report: MasterReport | None = None,
) -> core.Context:
    """A core context whose metrics and TensorBoard files go to ``run_dir``, and its checkpoints too.

    Args:
        run_dir: The run directory.
        distributed: The ranks.
        metric: As for :class:`LocalTrainContext`.
        smaller_is_better: Of that metric.
        storage_config: A ``checkpoint_storage``, for the checkpoints to go there instead.
        report: Who tells a master; of checkpoints only where they are in the run directory.

    Raises:
        ConfigError: nothing can be written there.
    """
    there = RunDir(run_dir)
    checkpoints = there.checkpoints
    make_private(checkpoints)
    if distributed.rank == 0:
        remove_partial(checkpoints)  # of a run that was killed
    if storage_config is not None:
        checkpoint: Any = StoredElsewhere(distributed, storage_config, run_dir)
    else:
        manager = AtomicStorage(str(checkpoints), there.metrics, is_chief=distributed.rank == 0)
        checkpoint = LocalCheckpointContext(distributed, manager, report)
    return core.Context(
        distributed=distributed,
        checkpoint=checkpoint,
        preempt=SignalPreemptContext(distributed),
        train=LocalTrainContext(run_dir, metric=metric, smaller_is_better=smaller_is_better, report=report),
        profiler=LocalProfiler(run_dir, distributed),
    )
