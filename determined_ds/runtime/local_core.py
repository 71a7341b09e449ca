"""Determined's core context without a cluster: the same calls, with files in a run directory."""

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
from determined_ds.protocol.heartbeat import HEART
from determined_ds.protocol.links import Links
from determined_ds.protocol.metrics_file import append_record, jsonable, put_on_disk, read_records
from determined_ds.protocol.run_dir import RunDir, make_private
from determined_ds.protocol.signals import STOP
from determined_ds.runtime.system_metrics import LocalProfiler

if TYPE_CHECKING:
    from determined_ds.runtime.master.unmanaged import MasterReport


class LocalTrainContext(core.DummyTrainContext):
    """Writes metrics to ``metrics.jsonl`` instead of sending them to a master.

    Args:
        run_dir: The run directory.
        metric: ``searcher.metric``: the validation metric that the best checkpoint is chosen by.
        smaller_is_better: Of that metric.
        report: Reports the same to a master, or None.
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
        make_private(self._there.tensorboard)
        super().__init__(tensorboard_path=self._there.tensorboard)
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self._report = report
        self._best: float | None = None
        self._remember_best()

    def _remember_best(self) -> None:
        """The best validation before, where a run is resumed."""
        for record in read_records(self._there.current(self._there.metrics), "validation"):
            self._note_best(record["metrics"])

    def set_status(self, status: str) -> None:
        """The status is not shown off-cluster."""

    def report_progress(self, progress: float) -> None:
        """The terminal shows it."""
        if self._report is not None:
            self._report.progress(progress)

    def upload_tensorboard_files(self, *args: Any, **kwargs: Any) -> None:
        """They are in the run directory already."""

    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any = None
    ) -> None:
        self.report_metrics("training", steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.report_metrics("validation", steps_completed, metrics)
        self._note_best(metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        record = {"group": group, "steps_completed": steps_completed, "metrics": metrics}
        append_record(self._there.metrics, {**record, "time": round(time.time(), 3)})
        if self._report is not None:
            self._report.metrics(group, steps_completed, jsonable(metrics))

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        value = finite(metrics.get(self._metric))
        if is_better(value, self._best, smaller_is_better=self._smaller_is_better):
            self._best = value

    def get_experiment_best_validation(self) -> float | None:
        return self._best


class AtomicStorage(storage.SharedFSStorageManager):
    """Checkpoints that are either complete or absent: written to a temporary folder, synced to the disk, then renamed.

    Args:
        base_path: The folder of the checkpoints.
        metrics: The file of the metrics, synced first: a run that resumes from the checkpoint does not report earlier
            batches again.
        is_chief: Whether this is rank 0, which renames.
        shared: Whether other runs write to the folder too; theirs are left alone.
    """

    def __init__(self, base_path: str, metrics: Path, *, is_chief: bool = True, shared: bool = False) -> None:
        super().__init__(base_path)
        self._shared = shared
        self.folder = Path(base_path)
        self._metrics = metrics
        self._is_chief = is_chief

    def store_path_is_direct_access(self) -> bool:
        """No: it becomes the checkpoint in :meth:`post_store_path`."""
        return False

    def pre_store_path(self, dst: str) -> Path:
        path = self.folder / f".{dst}{PARTIAL}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def post_store_path(self, src: str | os.PathLike[str], dst: str, paths: Any = None) -> None:
        """The folder becomes the checkpoint, once all ranks have written.

        Determined calls it on the first rank of each machine, since it compares device numbers, which differ between
        machines for one network file system. Source: ``_store_path_sharded`` in determined 0.38.1's
        ``core/_checkpoint.py``.
        """
        if self._is_chief:
            self.publish(Path(src), dst)

    def publish(self, src: Path, dst: str) -> None:
        """Rename a folder to a checkpoint, once it is on the disk."""
        put_on_disk(self._metrics)
        put_on_disk(self._metrics.parent)
        sync_to_disk(src)
        os.rename(src, self.folder / dst)
        put_on_disk(self.folder)

    def set_aside(self, uuid: str) -> Path:
        """Make a checkpoint a folder that is none, to be deleted. Returns the folder."""
        aside = self.folder / f".{uuid}{PARTIAL}"
        os.rename(self.folder / uuid, aside)
        return aside

    def counted(self, kept: Sequence[str]) -> list[str]:
        """Uuids that a limit counts, the first ones to go first: this run's damaged checkpoints, then those kept.

        Args:
            kept: Uuids that the run knows, the oldest first; those deleted by another command are left out.
        """
        if self._shared:
            return list(kept)
        there = checkpoints_in(self.folder)
        unknown = [found for found in reversed(there) if found.uuid not in kept]
        damaged = [found.uuid for found in unknown if damage_of(found.path) is not None]
        names = {found.uuid for found in there}
        return [*damaged, *(uuid for uuid in kept if uuid in names)]


class LocalCheckpointContext(core.DummyCheckpointContext):
    """Checkpoints in the run directory.

    Args:
        distributed: The ranks.
        storage_manager: Writes them.
        report: Reports them to a master, or None.
        links: Of the run directory, or None where they are elsewhere.
    """

    def __init__(
        self,
        distributed: core.DistributedContext,
        storage_manager: storage.StorageManager,
        report: MasterReport | None,
        links: Links | None = None,
    ) -> None:
        super().__init__(distributed, storage_manager)
        self._report = report
        self._links = links

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:
        if self._links is not None:
            self._links.update()
        if self._report is not None:
            self._report.checkpoint(storage_id, resources, metadata)

    def _report_checkpoint_deleted(self, storage_id: str, resources: Any = None) -> None:
        if self._links is not None:
            self._links.update()
        if self._report is not None:
            self._report.deleted(storage_id, resources)


class SignalPreemptContext(core.DummyPreemptContext):
    """Preemption by SIGTERM."""

    def should_preempt(self, auto_ack: bool = True) -> bool:
        HEART.beat()
        if self._preempt_mode is core.PreemptMode.WorkersAskChief:
            return bool(self._dist.broadcast(STOP.is_set()))
        return STOP.is_set()


def local_core_context(
    run_dir: Path,
    distributed: core.DistributedContext,
    *,
    metric: str = "",
    smaller_is_better: bool = True,
    report: MasterReport | None = None,
    checkpoint_dir: Path | None = None,
) -> core.Context:
    """A core context whose metrics and TensorBoard files go to ``run_dir``, and its checkpoints too.

    Args:
        run_dir: The run directory.
        distributed: The ranks.
        metric: As for :class:`LocalTrainContext`.
        smaller_is_better: Of that metric.
        report: Reports to a master, or None.
        checkpoint_dir: For the checkpoints, beside those of other runs; None for the run directory.
    """
    there, is_chief = RunDir(run_dir), distributed.rank == 0
    make_private(there.checkpoints)
    if is_chief:
        remove_partial(there.checkpoints)  # of a run that was killed
    links = Links(there, metric=metric, smaller_is_better=smaller_is_better)
    folder = checkpoint_dir or there.checkpoints
    make_private(folder)
    manager = AtomicStorage(str(folder), there.metrics, is_chief=is_chief, shared=checkpoint_dir is not None)
    checkpoint = LocalCheckpointContext(distributed, manager, report, None if checkpoint_dir else links)
    return core.Context(
        distributed=distributed,
        checkpoint=checkpoint,
        preempt=SignalPreemptContext(distributed, core.PreemptMode.ChiefOnly),
        train=LocalTrainContext(run_dir, metric=metric, smaller_is_better=smaller_is_better, report=report),
        profiler=LocalProfiler(run_dir, distributed),
    )
