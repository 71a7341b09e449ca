"""Determined's core context without a cluster: the same calls, with files in a run directory.

A trial under our loop, a session and a script that calls ``det.core.init()`` use the same one. A script, which no loop
of ours drives, also hands over its :class:`ScriptRun`: its reports then say how far it has got, and each checkpoint
that it writes is sealed with a manifest here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined import core
from determined.common import storage

from determined_ds.checkpoints.files import (
    MANIFEST,
    METADATA,
    PARTIAL,
    checkpoints_in,
    damage_of,
    files_of,
    fingerprint,
    finite,
    is_better,
    put_on_disk,
    remove_partial,
    sync_to_disk,
    write_manifest,
)
from determined_ds.errors import ConfigError, Problem
from determined_ds.logs.tensorboard import write_scalars
from determined_ds.rundir.handed_on import REPORT
from determined_ds.rundir.metrics_file import append_record, jsonable, read_records
from determined_ds.rundir.records import relink
from determined_ds.rundir.run_dir import RunDir, make_private
from determined_ds.rundir.signals import HEART, STOP
from determined_ds.train.here import ScriptRun


def master_report(run_dir: Path, config: Mapping[str, Any], point: Mapping[str, Any], rank: int) -> Any:
    """Within, rank 0's reports go to the master that the run is reported to; gives None where there is none."""
    if REPORT not in os.environ or rank != 0:
        return contextlib.nullcontext()
    from determined_ds.cluster.unmanaged import MasterReport

    return MasterReport(run_dir, config, point)


class LocalTrainContext(core.DummyTrainContext):
    """Writes metrics to ``metrics.jsonl`` instead of sending them to a master; see :func:`local_core_context`."""

    _trial_id = _exp_id = 0

    def __init__(
        self, there: RunDir, searcher: Mapping[str, Any], report: Any, run: ScriptRun | None, scalars: bool
    ) -> None:
        make_private(there.tensorboard)
        super().__init__(tensorboard_path=there.tensorboard)
        self._there, self._searcher, self._report, self._run = there, searcher, report, run
        self._writes_scalars = scalars
        self._writer: Any = None
        self._best: float | None = None
        for record in read_records(there.current(there.metrics), "validation"):  # it resumes
            self._note_best(record["metrics"])

    def report_progress(self, progress: float) -> None:
        """The terminal shows it."""
        HEART.beat()
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

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        steps_completed = int(steps_completed)  # a script may count with numpy, or in a tensor
        if self._run is not None:
            self._run.begun()
        record = {"group": group, "steps_completed": steps_completed, "metrics": metrics}
        append_record(self._there.metrics, {**record, "time": round(time.time(), 3)})
        if self._report is not None:
            self._report.metrics(group, steps_completed, jsonable(metrics))
        if group == "validation":
            self._note_best(metrics)
        if self._writes_scalars and group in ("training", "validation"):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(log_dir=str(self._there.tensorboard))
            write_scalars(self._writer, group, steps_completed, metrics)
            self._writer.flush()

    def report_early_exit(self, reason: core.EarlyExitReason) -> None:
        """Refuse the point: the core context calls this for ``det.InvalidHP``, and would then exit with status 0."""
        if core.EarlyExitReason(reason) == core.EarlyExitReason.INVALID_HP:
            message = f"the script cannot run with this point: {sys.exc_info()[1] or reason}"
            fix = "choose other values, e.g. by --set hyperparameters.NAME=VALUE"
            raise ConfigError(Problem(key="hyperparameters", message=message, fix=fix, code="invalid-hp"))

    def get_experiment_best_validation(self) -> float | None:
        return self._best

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        value, smaller = (
            finite(metrics.get(self._searcher.get("metric", ""))),
            self._searcher.get("smaller_is_better"),
        )
        if is_better(value, self._best, smaller_is_better=smaller is not False):
            self._best = value


class AtomicStorage(storage.SharedFSStorageManager):
    """Checkpoints that are either complete or absent: written to a temporary folder, synced to the disk, then renamed.

    In a ``shared`` folder those of other runs are left alone; ``elsewhere`` are folders of other runs' checkpoints,
    which are read by their uuids as well.
    """

    def __init__(
        self, base_path: str, metrics: Path, *, shared: bool = False, elsewhere: Sequence[Path] = ()
    ) -> None:
        super().__init__(base_path)
        self.folder, self._metrics, self._shared = Path(base_path), metrics, shared
        self._elsewhere = {path.name: str(path.absolute()) for path in elsewhere}

    def store_path_is_direct_access(self) -> bool:
        """No: what is written becomes a checkpoint in :meth:`publish`."""
        return False

    def pre_store_path(self, dst: str) -> Path:
        path = self.folder / f".{dst}{PARTIAL}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def upload(self, src: str | os.PathLike[str], dst: str, paths: Any = None) -> None:
        super().upload(src, self.pre_store_path(dst).name, paths)

    def publish(self, uuid: str, metadata: Mapping[str, Any]) -> None:
        """Make what all ranks have written a checkpoint, with a manifest and this metadata; on rank 0."""
        written = self.pre_store_path(uuid)
        if not (written / MANIFEST).exists():  # our own writer has the checksums, and seals it
            files = {name: fingerprint(written / name) for name in files_of(written)}
            write_manifest(written, files, metadata)
        put_on_disk(self._metrics)  # a run that resumes from it does not report earlier batches again
        put_on_disk(self._metrics.parent)
        sync_to_disk(written)
        os.rename(written, self.path_of(uuid))
        put_on_disk(self.folder)

    def path_of(self, uuid: str) -> Path:
        """The folder of a checkpoint, of this run or one that it continues."""
        return Path(self._elsewhere.get(uuid) or self.folder / uuid)

    def restore_path(self, src: str, selector: Any = None) -> Any:
        return super().restore_path(str(self.path_of(src)), selector)

    def download(self, src: str, dst: str | os.PathLike[str], selector: Any = None) -> None:
        super().download(str(self.path_of(src)), dst, selector)

    def set_aside(self, uuid: str) -> Path:
        """Make a checkpoint a folder that is none, to be deleted. Returns the folder."""
        aside = self.folder / f".{uuid}{PARTIAL}"
        os.rename(self.folder / uuid, aside)
        return aside

    def counted(self, kept: Sequence[str]) -> list[str]:
        """Uuids that a limit counts, those to go first first: this run's damaged checkpoints, then those ``kept``."""
        if self._shared:
            return list(kept)
        there = {found.uuid: found.path for found in checkpoints_in(self.folder)}
        others = [uuid for uuid in reversed(there) if uuid not in kept]
        damaged = [uuid for uuid in others if damage_of(there[uuid]) is not None]
        return [*damaged, *(uuid for uuid in kept if uuid in there)]


class LocalCheckpointContext(core.DummyCheckpointContext):
    """Checkpoints in a folder, each complete or absent; see :func:`local_core_context`."""

    def __init__(self, ranks: Any, files: AtomicStorage, report: Any, links: Any, run: Any) -> None:
        super().__init__(ranks, files)
        self._files, self._report, self._links, self._run = files, report, links, run

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:
        """Called on rank 0 once all ranks have written, before they go on.

        Source: ``_store_path_sharded`` in determined 0.38.1's ``core/_checkpoint.py``.
        """
        if "steps_completed" not in (metadata or {}):  # a master requires it
            message = "the metadata of a checkpoint must have steps_completed"
            fix = "core_context.checkpoint.store_path({'steps_completed': batches}), or upload(..., metadata=...)"
            raise ConfigError(Problem(key="core_context.checkpoint", message=message, fix=fix))
        if self._run is not None:
            self._run.begun()
        self._files.publish(storage_id, metadata)
        if self._links is not None:
            relink(self._links)
        if self._report is not None:
            self._report.checkpoint(storage_id, resources, metadata)

    def _report_checkpoint_deleted(self, storage_id: str, resources: Any = None) -> None:
        if self._links is not None:
            relink(self._links)
        if self._report is not None:
            self._report.deleted(storage_id, resources)

    def upload(self, *args: Any, shard: bool = False, **kwargs: Any) -> str:
        uuid = super().upload(*args, shard=shard, **kwargs)
        if shard:
            self._dist.allgather(None)  # rank 0 has published it
        return uuid

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self._files.path_of(storage_id) / METADATA).read_bytes())
            return found if isinstance(found, dict) else {}
        return {}


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
    searcher: Mapping[str, Any],
    *,
    report: Any = None,
    checkpoint_dir: Path | None = None,
    run: ScriptRun | None = None,
    writes_scalars: bool = False,
    preempt_mode: core.PreemptMode = core.PreemptMode.ChiefOnly,
    **more: Any,
) -> core.Context:
    """A core context whose metrics and TensorBoard files go to ``run_dir``, and its checkpoints too.

    The best one is chosen by the metric of ``searcher``; ``report`` sends the same to a master. With ``checkpoint_dir``
    they lie beside those of other runs. ``run`` is that of a script which called ``core.init``; our loops write scalars
    for TensorBoard themselves. ``more`` are further parts of Determined's context.
    """
    there, is_chief = RunDir(run_dir), distributed.rank == 0
    folder, report = checkpoint_dir or there.checkpoints, report if is_chief else None
    make_private(there.checkpoints)
    make_private(folder)
    if is_chief:
        remove_partial(there.checkpoints)  # of a run that was killed
    links = there if checkpoint_dir is None else None
    elsewhere = [path for path in (run.fork, run.resume_from) if path] if run is not None else []
    files = AtomicStorage(str(folder), there.metrics, shared=checkpoint_dir is not None, elsewhere=elsewhere)
    return core.Context(
        distributed=distributed,
        checkpoint=LocalCheckpointContext(distributed, files, report, links, run),
        preempt=SignalPreemptContext(distributed, preempt_mode),
        train=LocalTrainContext(there, searcher, report, run, writes_scalars),
        **more,
    )
