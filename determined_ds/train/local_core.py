"""Determined's core context without a cluster: the same calls, with files in a run directory.

A trial under our loop, a session and a script that calls ``det.core.init()`` use the same one. The script finds it by
:func:`as_on_cluster`, and with it its trial, a stop by SIGTERM, and ranks that meet by files. There is no master.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import determined as det
import torch.distributed as dist
from determined import _info, core
from determined.common import storage
from determined.core import _context

from determined_ds.checkpoints.files import (
    MANIFEST,
    METADATA,
    PARTIAL,
    checkpoint_at,
    checkpoints_in,
    damage_of,
    files_of,
    fingerprint,
    finite,
    is_better,
    put_on_disk,
    read_object,
    remove_partial,
    sync_to_disk,
    write_manifest,
)
from determined_ds.config.layout import Accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.rundir.handed_on import REPORT, STORE
from determined_ds.rundir.metrics_file import append_record, jsonable, read_records
from determined_ds.rundir.records import relink
from determined_ds.rundir.run_dir import RunDir, make_private
from determined_ds.rundir.signals import HEART, STOP
from determined_ds.train.group.process_group import TorchDistributedContext, load_deepspeed
from determined_ds.train.rank import Here, Run, here

# ------------------------------------------------------------------------------------------- the context


def local_core_context(
    trial: Here,
    run_dir: Path,
    distributed: core.DistributedContext,
    ending: contextlib.ExitStack,
    *,
    checkpoint_dir: Path | None = None,
    script: Run | None = None,
    preempt_mode: core.PreemptMode = core.PreemptMode.ChiefOnly,
    **more: Any,
) -> core.Context:
    """A core context whose metrics, checkpoints and TensorBoard files go to ``run_dir``.

    With ``checkpoint_dir`` checkpoints lie beside those of other runs. ``script`` is the run of one, which shows by its
    first report that it has taken over. Reports to a master, where the run is reported to one, end with ``ending``.
    """
    there, report = RunDir(run_dir), None
    for folder in (there.checkpoints, there.tensorboard, checkpoint_dir or there.checkpoints):
        make_private(folder)
    if distributed.rank == 0:
        remove_partial(there.checkpoints)  # of a run that was killed
        if REPORT in os.environ:
            from determined_ds.cluster.unmanaged import MasterReport

            point = trial.hyperparameters.data
            report = ending.enter_context(MasterReport(run_dir, trial.exp_conf or {}, point))
    return core.Context(
        distributed=distributed,
        checkpoint=_Checkpoints(distributed, AtomicStorage(there, checkpoint_dir), report, script),
        preempt=_Preemption(distributed, preempt_mode),
        train=_Reports(there, trial.searcher, report, script),
        **more,
    )


class _Reports(core.DummyTrainContext):
    """Metrics to ``metrics.jsonl``."""

    _trial_id = _exp_id = 0

    def __init__(self, there: RunDir, searcher: Mapping[str, Any], report: Any, script: Run | None) -> None:
        super().__init__(tensorboard_path=there.tensorboard)
        self._there, self._searcher, self._report, self._script = there, searcher, report, script
        self._best: float | None = None
        for record in read_records(there.current(there.metrics), "validation"):  # it resumes
            self._note_best(record["metrics"])

    def _report_trial_metrics(
        self, group: str, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any = None
    ) -> None:
        steps_completed = int(steps_completed)  # a script may count with numpy, or in a tensor
        if self._script is not None:
            self._script.begun()
        record = {"group": group, "steps_completed": steps_completed, "metrics": metrics}
        append_record(self._there.metrics, {**record, "time": round(time.time(), 3)})
        if self._report is not None:
            self._report.send("train", "report_metrics", group, steps_completed, jsonable(metrics))
        if group == "validation":
            self._note_best(metrics)

    def report_progress(self, progress: float) -> None:
        HEART.beat()  # the terminal shows it
        if self._report is not None:
            self._report.send("train", "report_progress", progress)

    def report_early_exit(self, reason: core.EarlyExitReason) -> None:
        """Refuse the point: the core context calls this for ``det.InvalidHP``, and would then exit with status 0."""
        if core.EarlyExitReason(reason) == core.EarlyExitReason.INVALID_HP:
            message = f"the script cannot run with this point: {sys.exc_info()[1] or reason}"
            fix = "choose other values, e.g. by --set hyperparameters.NAME=VALUE"
            raise ConfigError(Problem(key="hyperparameters", message=message, fix=fix, code="invalid-hp"))

    def get_experiment_best_validation(self) -> float | None:
        return self._best

    def _note_best(self, metrics: Mapping[str, Any]) -> None:
        value = finite(metrics.get(self._searcher.get("metric", "")))
        is_smaller = self._searcher.get("smaller_is_better") is not False
        if is_better(value, self._best, smaller_is_better=is_smaller):
            self._best = value


class AtomicStorage(storage.SharedFSStorageManager):
    """Checkpoints that are either complete or absent: written to a temporary folder, synced to the disk, then renamed.

    They lie in the run directory, or in a folder beside those of other runs, which are left alone. A checkpoint
    elsewhere is read by the path of its folder.
    """

    def __init__(self, there: RunDir, shared: Path | None) -> None:
        self.folder, self._there, self._shared = shared or there.checkpoints, there, shared is not None
        super().__init__(str(self.folder))

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
        written, metrics = self.pre_store_path(uuid), self._there.metrics
        if not (written / MANIFEST).exists():  # our own writer has the checksums, and seals it
            files = {name: fingerprint(written / name) for name in files_of(written)}
            write_manifest(written, files, metadata)
        put_on_disk(metrics)  # a run that resumes from it does not report earlier batches again
        put_on_disk(metrics.parent)
        sync_to_disk(written)
        os.rename(written, self.folder / uuid)
        put_on_disk(self.folder)
        self.relink()

    def relink(self) -> None:
        """Have the links of the run directory name its checkpoints of now."""
        if not self._shared:
            relink(self._there)

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


class _Checkpoints(core.DummyCheckpointContext):
    """Checkpoints to an :class:`AtomicStorage`."""

    def __init__(self, ranks: Any, files: AtomicStorage, report: Any, script: Run | None) -> None:
        super().__init__(ranks, files)
        self._files, self._report, self._script = files, report, script

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:
        """Called on rank 0 once all ranks have written, before they go on.

        Source: ``_store_path_sharded`` in determined 0.38.1's ``core/_checkpoint.py``.
        """
        if "steps_completed" not in (metadata or {}):  # a master requires it
            message = "the metadata of a checkpoint must have steps_completed"
            fix = "core_context.checkpoint.store_path({'steps_completed': batches}), or upload(..., metadata=...)"
            raise ConfigError(Problem(key="core_context.checkpoint", message=message, fix=fix))
        if self._script is not None:
            self._script.begun()
        self._files.publish(storage_id, metadata)
        if self._report is not None:
            self._report.send("checkpoint", "_report_checkpoint", storage_id, resources, metadata)

    def _report_checkpoint_deleted(self, storage_id: str, resources: Any = None) -> None:
        self._files.relink()
        if self._report is not None:
            self._report.send("checkpoint", "_report_checkpoint_deleted", storage_id, resources)

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        return read_object(self._files.folder / storage_id / METADATA)


class _Preemption(core.DummyPreemptContext):
    """Preemption by SIGTERM."""

    def should_preempt(self, auto_ack: bool = True) -> bool:
        HEART.beat()
        if self._preempt_mode is core.PreemptMode.WorkersAskChief:
            return bool(self._dist.broadcast(STOP.is_set()))
        return STOP.is_set()


# ------------------------------------------------------------------------------------------- for a script

# A name under .invalid is resolved nowhere (RFC 2606).
NO_MASTER = "http://no-master.invalid:80"
# Scripts and DeepSpeed look whether these are set; nothing listens there.
NOMINAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@contextlib.contextmanager
def as_on_cluster(run: Run, accelerator: Accelerator) -> Iterator[None]:
    """In here Determined gives a script what it gives a trial on a cluster: its information, a core context, ranks."""
    load_deepspeed(accelerator.name)
    for name, value in NOMINAL.items():
        os.environ.setdefault(name, value)
    trial, size = here(), int(os.environ.get("WORLD_SIZE", "1"))
    assert trial is not None
    with contextlib.ExitStack() as ending:

        def core_init(
            *,
            distributed: core.DistributedContext | None = None,
            checkpoint_storage: str | dict[str, Any] | None = None,
            preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
            tensorboard_mode: core.TensorboardMode = core.TensorboardMode.AUTO,
        ) -> core.Context:
            """In place of ``determined.core.init``, with its arguments."""
            ranks = distributed or met()
            if checkpoint_storage is not None and ranks.rank == 0:
                where = "checkpoints go to the run directory"
                print(
                    f"warning: checkpoint_storage of core.init() is not used here: {where}", file=sys.stderr
                )
            run.listens = True
            mode, info = core.PreemptMode(preempt_mode), det.get_cluster_info()
            context = local_core_context(
                trial, run.run_dir, ranks, ending, script=run, preempt_mode=mode, info=info
            )
            if run.measurement is None:
                from determined_ds.logs.reporting import reported_to_tools

                ending.enter_context(reported_to_tools(context, trial, accelerator, run_dir=run.there))
            return context

        def met(*_: Any, **__: Any) -> core.DistributedContext:
            """In place of ``DistributedContext.from_torch_distributed``: by the process group, without fixed ports."""
            return core.DummyDistributedContext() if size == 1 else TorchDistributedContext()

        replaced: list[tuple[Any, str, Any]] = [
            (_info, "_info", _info_of(run)),
            (core, "init", core_init),
            (_context, "init", core_init),
        ]
        if STORE in os.environ:  # not under another launcher
            groups = itertools.count(1)

            def by_file(_url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Any]:
                """Have process groups meet by files: runs on one machine do not disturb each other, no port is open."""
                found = dist.FileStore(f"{os.environ[STORE]}-{next(groups)}", size)
                found.set_timeout(timeout)
                yield found, int(os.environ["RANK"]), size

            # Source: ``rendezvous`` in torch 2.13's ``distributed/rendezvous.py``; a function has its name, too.
            rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
            ending.enter_context(mock.patch.dict(rendezvous._rendezvous_handlers, {"env": by_file}))
            names = ("from_torch_distributed", "from_deepspeed")
            replaced += [(core.DistributedContext, name, met) for name in names]
        for replacement in replaced:
            ending.enter_context(mock.patch.object(*replacement))
        yield


def _info_of(run: Run) -> det.ClusterInfo:
    """What ``det.get_cluster_info()`` answers."""
    name, trial_id = f"{run.run_dir.parent.name}/{run.run_dir.name}", run.there.trial_id()
    given, hparams = run.experiment.config, dict(run.experiment.hyperparameters.data)
    config = {
        **given,
        "hyperparameters": hparams,
        "searcher": {
            "name": "single",
            "metric": "",
            "smaller_is_better": True,
            **(given.get("searcher") or {}),
        },
        "resources": {**(given.get("resources") or {}), "slots_per_trial": run.experiment.slots},
    }
    resumed = checkpoint_at(run.there.checkpoints / run.resume) if run.resume else None
    return det.ClusterInfo(
        master_url=NO_MASTER,
        cluster_id="det-ds",
        agent_id=socket.gethostname(),
        slot_ids=list(range(int(os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1")))),
        task_id=name,
        allocation_id=f"{name}.1",
        session_token="",
        task_type="TRIAL",
        latest_checkpoint=run.resume or (str(run.fork) if run.fork else None),
        trial_info=det.TrialInfo(
            trial_id=trial_id,
            experiment_id=trial_id,
            trial_seed=run.experiment.trial_seed,
            hparams=hparams,
            config=config,
            steps_completed=max(0, resumed.steps_completed) if resumed else 0,
            trial_run_id=1,
            debug=bool(given.get("debug")),
            inter_node_network_interface=None,
        ),
    )
