"""``det.core.init()`` in a script under ``det-ds run``: Determined's core context, with files in the run directory."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import determined as det
from determined import core

from determined_ds.devices import detect_accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Task
from determined_ds.protocol.checkpoint_files import (
    METADATA,
    files_of,
    fingerprint,
    remove_partial,
    write_manifest,
)
from determined_ds.protocol.heartbeat import HEART
from determined_ds.protocol.links import Links, relink
from determined_ds.protocol.run_dir import make_private
from determined_ds.protocol.signals import TRAINED
from determined_ds.runtime.local_core import (
    AtomicStorage,
    LocalCheckpointContext,
    LocalTrainContext,
    SignalPreemptContext,
)
from determined_ds.runtime.logs.attached import reported_to_tools
from determined_ds.runtime.scalars import write_batches, write_scalars
from determined_ds.runtime.scripts.given_run import ScriptRun, script_run
from determined_ds.runtime.system_metrics import LocalProfiler
from determined_ds.runtime.warning_keeper import warned

NO_DISTRIBUTED = (
    "distributed=det.core.DistributedContext.from_torch_distributed(), after the process group is made"
)


def core_init(
    *,
    distributed: core.DistributedContext | None = None,
    checkpoint_storage: str | dict[str, Any] | None = None,
    preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
    tensorboard_mode: core.TensorboardMode = core.TensorboardMode.AUTO,
) -> core.Context:
    """In place of ``determined.core.init``, with its arguments.

    Args:
        distributed: The ranks; required where there are several.
        checkpoint_storage: Not used: checkpoints go to the run directory.
        preempt_mode: Which ranks call ``should_preempt()``.
        tensorboard_mode: Whether metrics are written for TensorBoard too.

    Raises:
        ConfigError: ``distributed`` is missing.
    """
    run = script_run()
    assert run is not None, "replaced outside of a script's rank"
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if distributed is None and size > 1:
        message = f"core.init() needs to know the {size} ranks"
        raise ConfigError(
            Problem(key="distributed", message=message, fix=f"write core.init({NO_DISTRIBUTED})")
        )
    distributed = distributed or core.DummyDistributedContext()
    if checkpoint_storage is not None and distributed.rank == 0:
        text = (
            "warning: checkpoint_storage of core.init() is not used here: checkpoints go to the run directory"
        )
        print(warned(text), file=sys.stderr)
    run.listens = True
    there, config = run.there, run.experiment.config
    make_private(there.checkpoints)
    if distributed.rank == 0:
        remove_partial(there.checkpoints)  # of a run that was killed
    return ScriptContext(
        run,
        distributed=distributed,
        checkpoint=ScriptCheckpointContext(run, distributed),
        preempt=SignalPreemptContext(distributed, core.PreemptMode(preempt_mode)),
        train=ScriptTrainContext(run, distributed, core.TensorboardMode(tensorboard_mode)),
        searcher=_searcher(dict(config.get("searcher") or {}), distributed),
        profiler=LocalProfiler(run.run_dir, distributed),
        info=det.get_cluster_info(),
    )


class ScriptContext(core.Context):
    """The core context of a script, whose reports go to the tools of ``hyperparameters.logging`` too.

    Args:
        run: The run.
        parts: Of Determined's core context.
    """

    def __init__(self, run: ScriptRun, **parts: Any) -> None:
        super().__init__(**parts)
        self._tools = contextlib.ExitStack()
        if run.measurement is None:
            experiment = run.experiment
            task = Task(
                hyperparameters=experiment.hyperparameters,
                exp_conf=experiment.config,
                seed=experiment.trial_seed,
            )
            devices = detect_accelerator(run.accelerator)
            self._tools.enter_context(reported_to_tools(self, task, devices, run_dir=run.there))
            atexit.register(self._tools.close)  # of a script that does not close it

    def close(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> None:
        try:
            error = exc_val or sys.exc_info()[1]  # a script may close it in a finally
            self._tools.__exit__(None if error is None else type(error), error, None)
        finally:
            super().close(exc_type, exc_val, exc_tb)


def begun(run: ScriptRun, steps: int) -> None:
    """The script has got as far as to report: a run that resumes has taken over, and may be resumed from here."""
    TRAINED.set()
    if run.there.adopt_next():
        relink(run.there)
    if run.watched:  # how long a script may take between two reports, only its user knows
        HEART.step(steps)


# ------------------------------------------------------------------------------------------- checkpoints


class ScriptStorage(AtomicStorage):
    """Checkpoints that a script writes or uploads: rank 0 seals each, once all ranks have written.

    Args:
        run: The run.
        is_chief: Whether this is rank 0.
    """

    def __init__(self, run: ScriptRun, *, is_chief: bool) -> None:
        super().__init__(str(run.there.checkpoints), run.there.metrics, is_chief=is_chief)
        self._elsewhere = {each.name: str(each) for each in (run.fork, run.resume_from) if each}

    @contextlib.contextmanager
    def store_path(self, dst: str) -> Iterator[Path]:
        yield self.pre_store_path(dst)

    def post_store_path(self, src: str | os.PathLike[str], dst: str, paths: Any = None) -> None:
        """Nothing yet: see :meth:`seal`."""

    def upload(self, src: str | os.PathLike[str], dst: str, paths: Any = None) -> None:
        super().upload(src, self.pre_store_path(dst).name, paths)

    def seal(self, uuid: str, metadata: Mapping[str, Any]) -> None:
        """Make what was written a checkpoint, with a manifest."""
        written = self.pre_store_path(uuid)
        write_manifest(written, {name: fingerprint(written / name) for name in files_of(written)}, metadata)
        self.publish(written, uuid)

    def restore_path(self, src: str, selector: Any = None) -> Any:
        return super().restore_path(self._elsewhere.get(src, src), selector)

    def download(self, src: str, dst: str | os.PathLike[str], selector: Any = None) -> None:
        super().download(self._elsewhere.get(src, src), dst, selector)


def links_of(run: ScriptRun) -> Links:
    """The links of a script's run directory."""
    experiment = run.experiment
    return Links(run.there, metric=experiment.metric, smaller_is_better=experiment.smaller_is_better)


class ScriptCheckpointContext(LocalCheckpointContext):
    """Checkpoints in the run directory, each whole or absent."""

    def __init__(self, run: ScriptRun, distributed: core.DistributedContext) -> None:
        self._files = ScriptStorage(run, is_chief=distributed.rank == 0)
        super().__init__(distributed, self._files, run.report, links_of(run))
        self._run = run

    def _report_checkpoint(self, storage_id: str, resources: Any = None, metadata: Any = None) -> None:
        begun(self._run, _steps_in(metadata))
        self._files.seal(storage_id, metadata)
        super()._report_checkpoint(storage_id, resources, metadata)

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: Any = None,
        *,
        shard: bool = False,
        **more: Any,
    ) -> str:
        uuid = super().upload(ckpt_dir, metadata, shard=shard, **more)
        if shard:
            self._dist.allgather(None)  # rank 0 has published it
        return uuid

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        return _metadata_of(self._run, storage_id)


def _steps_in(metadata: Any) -> int:
    """The ``steps_completed`` of a checkpoint, which a master requires."""
    if "steps_completed" not in (metadata or {}):
        message = "the metadata of a checkpoint must have steps_completed"
        fix = "core_context.checkpoint.store_path({'steps_completed': batches}), or upload(..., metadata=...)"
        raise ConfigError(Problem(key="core_context.checkpoint", message=message, fix=fix, code="metadata"))
    return int(metadata["steps_completed"])


def _metadata_of(run: ScriptRun, uuid: str) -> dict[str, Any]:
    elsewhere = {each.name: each for each in (run.fork, run.resume_from) if each}
    folder = elsewhere.get(uuid, run.there.checkpoints / uuid)
    try:
        found = json.loads((folder / METADATA).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------- metrics


class ScriptTrainContext(LocalTrainContext):
    """Reports of a script: to ``metrics.jsonl``, and for TensorBoard unless it writes that itself."""

    def __init__(
        self, run: ScriptRun, distributed: core.DistributedContext, mode: core.TensorboardMode
    ) -> None:
        super().__init__(
            run.run_dir,
            metric=run.experiment.metric,
            smaller_is_better=run.experiment.smaller_is_better,
            report=run.report if distributed.rank == 0 else None,
        )
        self._run = run
        self._distributed = distributed
        self._tensorboard_mode = mode
        self._writes_scalars = mode == core.TensorboardMode.AUTO
        self._writer: Any = None
        self._last_validation: int | None = None

    def report_training_metrics(
        self, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any = None
    ) -> None:
        self._take("training", steps_completed, metrics, batch_metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._take("validation", steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: dict[str, Any]) -> None:
        self._take(group, steps_completed, metrics)

    def _take(
        self, group: str, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any = None
    ) -> None:
        steps_completed = int(steps_completed)  # of numpy, or a tensor
        begun(self._run, steps_completed)
        super().report_metrics(group, steps_completed, metrics)
        if group == "validation":
            self._last_validation = steps_completed
            self._note_best(metrics)
        if self._writes_scalars:
            self._write(group, steps_completed, metrics, batch_metrics)

    def _write(self, group: str, steps_completed: int, metrics: dict[str, Any], batch_metrics: Any) -> None:
        if group not in ("training", "validation"):
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(log_dir=str(self._there.tensorboard))
        write_batches(self._writer, group, steps_completed, batch_metrics or ())
        of_batches = {name for each in batch_metrics or () for name in each}
        rest = {name: value for name, value in metrics.items() if name not in of_batches}
        write_scalars(self._writer, group, steps_completed, rest)
        self._writer.flush()

    def upload_tensorboard_files(self, *args: Any, **kwargs: Any) -> None:
        if self._tensorboard_mode == core.TensorboardMode.AUTO:
            raise RuntimeError("upload_tensorboard_files can only be used in MANUAL mode")

    def report_progress(self, progress: float) -> None:
        if not 0 <= progress <= 1:
            raise ValueError(f"progress must be between 0 and 1, not {progress}")
        HEART.beat()
        super().report_progress(progress)

    def report_early_exit(self, reason: core.EarlyExitReason) -> None:
        """The script says that its hyperparameters cannot run, as ``det.InvalidHP`` does."""
        if core.EarlyExitReason(reason) == core.EarlyExitReason.INVALID_HP:
            error = sys.exc_info()[1]
            message = f"the script cannot run with this point: {error or reason}"
            fix = "choose other values, e.g. by --set hyperparameters.NAME=VALUE"
            raise ConfigError(Problem(key="hyperparameters", message=message, fix=fix, code="invalid-hp"))

    def _get_last_validation(self) -> int | None:
        return self._last_validation

    def set_metadata(self, metadata: dict[str, Any]) -> dict[str, Any]:
        self._there.write_metadata(metadata)
        return metadata

    def get_metadata(self) -> dict[str, Any]:
        return self._there.read_metadata()


# ------------------------------------------------------------------------------------------- searcher


class ScriptSearcher(core.DummySearcherContext):
    """``core_context.searcher``: one operation, of ``searcher.max_length``."""

    def __init__(self, distributed: core.DistributedContext, length: int, unit: core.Unit | None) -> None:
        super().__init__(distributed, length)
        self._unit = unit

    def get_configured_units(self) -> core.Unit | None:
        return self._unit


def _searcher(searcher: dict[str, Any], distributed: core.DistributedContext) -> Any:
    """None without ``searcher.max_length``, as on a cluster."""
    length = core._parse_searcher_max_length({"searcher": searcher})
    if not length:
        return None
    return ScriptSearcher(distributed, length, core._parse_searcher_units({"searcher": searcher}))
