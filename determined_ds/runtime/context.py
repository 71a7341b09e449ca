"""Determined's DeepSpeedTrialContext on any accelerator, and :func:`open_context`, which makes it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import determined as det
import torch
from determined import core
from determined.pytorch import deepspeed as det_ds

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.batch import BATCH_KEYS
from determined_ds.config.hyperparameters import stated_seed
from determined_ds.config.reconcile import ResolvedConfig, reconcile
from determined_ds.config.resolve import Where
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document
from determined_ds.documents.reading import read_json
from determined_ds.documents.writing import write_whole
from determined_ds.errors import ConfigError, Problem, TrainingError
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space.master_random import first_trial_seed
from determined_ds.experiment.task import Task, decide_task, hyperparameters_of, task_of_cluster
from determined_ds.protocol.handed_on import REPORT
from determined_ds.protocol.run_dir import RunDir, make_private
from determined_ds.runtime.data.moving import Mover
from determined_ds.runtime.data.seeds import seed_everything
from determined_ds.runtime.group.distributed import join_process_group
from determined_ds.runtime.group.peers import leave_peers
from determined_ds.runtime.local_core import local_core_context
from determined_ds.runtime.loop.custom_reducers import plain_reduced
from determined_ds.runtime.master.core_context import cluster_core_context
from determined_ds.runtime.scripts.cluster_info import cluster_info
from determined_ds.runtime.scripts.script_run import script_run
from determined_ds.runtime.upstream import only_errors
from determined_ds.trial.base import completed_hparams
from determined_ds.trial.ddp import engine_name
from determined_ds.trial.engine import fix_engine

logger = logging.getLogger("determined_ds")


class DeepSpeedTrialContext(det_ds.DeepSpeedTrialContext):
    """Determined's context, not tied to CUDA, with the reconciled configuration.

    :func:`open_context` makes it; a trial gets it as the argument of its ``__init__``.

    Attributes:
        resolved: What was decided before anything ran.
        engine: What trains: ``deepspeed``, or ``ddp`` for torch's own DistributedDataParallel, as a baseline.
    """

    engine = "deepspeed"

    def __init__(
        self,
        *,
        core_context: core.Context,
        resolved: ResolvedConfig,
        hyperparameters: Document,
        ds_config_path: Path,
        trial_seed: int,
        exp_conf: dict[str, Any] | None,
        steps_completed: int = 0,
        enable_tensorboard_logging: bool = True,
    ) -> None:
        self.resolved = resolved
        self._hyperparameters = hyperparameters
        self._called_wrap_mpu = False
        with only_errors("determined.pytorch"):  # a warning that APEX is missing, which ZeRO no longer needs
            super().__init__(
                core_context=core_context,
                trial_seed=trial_seed,
                hparams=completed_hparams(hyperparameters.data, resolved, ds_config_path),
                # Determined divides the global batch by the slots, but replicas share it.
                slots_per_trial=resolved.topology.data_parallel_world_size,
                num_gpus=resolved.accelerator.num_devices if resolved.accelerator.name == "cuda" else 0,
                exp_conf=exp_conf,
                steps_completed=steps_completed,
                enable_tensorboard_logging=enable_tensorboard_logging,
            )
        self._mover = Mover(self.device)

    def adopt(self) -> None:
        """Replace the files of the run, once the model is built and its checkpoint loaded; a collective."""
        hparams = self.get_hparams()
        path = Path(hparams["deepspeed_config"])
        run_dir = RunDir(path.parent.parent)
        if path.parent != run_dir.next:
            return
        self.distributed.allgather(None)  # all ranks have read what is there
        if self.distributed.rank == 0:
            run_dir.adopt_next()
        hparams["deepspeed_config"] = str(run_dir.deepspeed_config)

    def _init_device(self) -> None:
        if self.resolved.accelerator.name == "cuda":
            self.device = torch.device("cuda", self.distributed.get_local_rank())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")

    def wrap_mpu(self, mpu: det_ds.ModelParallelUnit) -> det_ds.ModelParallelUnit:
        """Set the model-parallel unit, before or after ``wrap_model_engine``.

        Args:
            mpu: E.g. ``DeepSpeedMPU(engine.mpu)``.

        Returns:
            ``mpu`` itself.

        Raises:
            ConfigError: it was called before.
        """
        if self._called_wrap_mpu:
            message, fix = "was called twice: a trial has one MPU", "call it once"
            raise ConfigError(Problem(key="context.wrap_mpu", message=message, fix=fix))
        self._called_wrap_mpu = True
        self._mpu = mpu
        return mpu

    def wrap_model_engine(self, model: Any) -> Any:
        """Register a DeepSpeed engine. See Determined's method of this name.

        Args:
            model: What ``deepspeed.initialize`` returned first.

        Returns:
            The engine.

        Raises:
            ConfigError: the context was opened for another kind of engine.
        """
        if self.engine != engine_name(model):
            message = f"the trial wraps an engine of {engine_name(model)}, which would train instead"
            fix = f"leave {self.engine} out, or make the engine with ReconciledTrial.initialize"
            raise ConfigError(
                Problem(key="engine", value=self.engine, message=message, fix=fix, code="engine")
            )
        chosen = self._mpu if self._called_wrap_mpu else None
        engine = super().wrap_model_engine(model)
        fix_engine(engine)
        if chosen is not None:
            self._mpu = chosen
        return engine

    def reduce_metrics(self, for_training: bool) -> dict[str, Any]:
        """The metrics of the custom reducers over all ranks; a collective.

        Args:
            for_training: Whether to reduce those of training, or those of validation.

        Returns:
            Metrics by name, as they can be reported.

        Raises:
            TrainingError: a reducer returned a dict where a value was expected, or the reverse.
        """
        try:
            metrics = super().reduce_metrics(for_training)
        except AssertionError as error:  # Determined's, of a reducer that returned a dict, or should have
            raise TrainingError(str(error)) from error
        return plain_reduced(metrics or {}, self._wrapped_reducers, for_training=for_training)

    def to_device(self, data: Any) -> Any:
        """Move a batch to the device. A warning names what cannot be moved, and where.

        Args:
            data: Tensors and arrays, in lists, tuples and mappings of any depth.

        Returns:
            The same structure, its tensors and arrays on the device.
        """
        return self._mover.move(data)

    def reconcile_ds_config(self, ds_config: Any) -> None:
        """Check that the configuration of an engine agrees with the reconciled one.

        Args:
            ds_config: ``engine._config`` (DeepSpeed's ``DeepSpeedConfig``), or a mapping.

        Raises:
            ConfigError: every batch size that differs.
        """
        batch = self.resolved.batch
        problems = []
        for key, name in BATCH_KEYS.items():
            value = ds_config.get(key) if isinstance(ds_config, Mapping) else getattr(ds_config, key, None)
            expected = getattr(batch, name)
            if value != expected:
                message = f"the engine's is not {expected}, which the hyperparameters and the slots make"
                fix = "initialize the engine with context.overwrite(...), or with args=self.args"
                problems.append(Problem(key=key, value=value, message=message, fix=fix, code="engine-config"))
        if problems:
            raise ConfigError(problems)

    def overwrite(
        self,
        base_ds_config: str | os.PathLike[str] | Mapping[str, Any],
        source: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A DeepSpeed JSON overwritten by ``overwrite_deepspeed_args``, with every "auto" filled.

        Args:
            base_ds_config: A path, or a mapping.
            source: What overwrites it; the hyperparameter ``overwrite_deepspeed_args`` if None.

        Returns:
            A plain mapping for ``deepspeed.initialize(config=...)``.

        Raises:
            ConfigError: it cannot run with these hyperparameters.
        """
        if isinstance(base_ds_config, Mapping):
            ds = Document(name="context.overwrite", data=_plain(base_ds_config))
        else:
            ds = read_json(Path(base_ds_config))
        document = self._hyperparameters
        if source is not None:
            data = {**document.data, "overwrite_deepspeed_args": _plain(source)}
            document = Document(name=document.name, data=data, places=document.places, prefix=document.prefix)
        resolved = self.resolved
        found = reconcile(
            document,
            ds,
            slots=resolved.topology.slots,
            accelerator=resolved.accelerator,
            machines=resolved.machines,
        )
        return found.writing_in(resolved.folder).ds_config


def _plain(data: Any) -> Any:
    """Mappings as dicts and tuples as lists, all the way down: attrdict turns lists to tuples."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    return data


@contextlib.contextmanager
def open_context(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
    experiment: Experiment | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    accelerator: str | None = None,
    engine: str = "deepspeed",
    storage: bool = False,
) -> Iterator[DeepSpeedTrialContext]:
    """Open a context for a ``DeepSpeedTrial``, on a cluster or off it, on CPUs or GPUs.

    The first four arguments are those of Determined's ``deepspeed.init``, which it replaces. On a cluster everything is
    taken from the cluster's information about the trial.

    Args:
        hparams: Hyperparameters of the trial.
        exp_conf: Experiment configuration, for ``context.get_experiment_config()``.
        distributed: The ranks, if the process group is joined already.
        enable_tensorboard_logging: Whether to write metrics for TensorBoard too.
        experiment: A loaded experiment, instead of ``hparams`` and ``exp_conf``.
        run_dir: For metrics, checkpoints and TensorBoard files, off-cluster; a new temporary folder if None.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.
        engine: ``deepspeed``, or ``ddp`` to train by torch's own DistributedDataParallel.
        storage: Write checkpoints to the experiment's ``checkpoint_storage`` off-cluster too.

    Yields:
        The context, until the block ends.

    Raises:
        ConfigError: the configuration cannot run. On a cluster, for a point of a hyperparameter search, the
            process ends as ``det.InvalidHP`` does instead, so that the searcher drops the point.
    """
    run = script_run()
    if run is not None:  # the script's experiment, as on a cluster
        run.listens = True
        experiment, run_dir = run.experiment, run_dir or run.run_dir
        accelerator, storage = accelerator or run.accelerator, storage or run.storage
    task = _task(hparams, exp_conf, experiment)
    devices = detect_accelerator(accelerator)
    distributed = distributed or join_process_group(devices)
    folder = Path(tempfile.mkdtemp() if task.on_cluster else _run_dir(run_dir, distributed))
    with (
        _core_context(task, folder, distributed, storage=storage) as core_context,
        _dropping_points(task, distributed),
    ):
        written_in = str(core_context.train.get_tensorboard_path())
        resolved = _resolve(task, distributed, devices).writing_in(written_in)
        seed_everything(task.seed)
        context = DeepSpeedTrialContext(
            core_context=core_context,
            resolved=resolved,
            hyperparameters=task.hyperparameters,
            ds_config_path=_write_ds_config(RunDir(folder), resolved, distributed),
            trial_seed=task.seed,
            exp_conf=task.exp_conf,
            steps_completed=task.steps_completed,
            enable_tensorboard_logging=enable_tensorboard_logging,
        )
        context.engine = engine
        yield context
        leave_peers()  # a rank that fails shows signs of life to its end


@contextlib.contextmanager
def _dropping_points(task: Task, distributed: core.DistributedContext) -> Iterator[None]:
    """Have a searcher drop a point that cannot run; rank 0 reports it."""
    try:
        yield
    except ConfigError as error:
        if not task.drops_point(error):
            raise
        if distributed.rank != 0:
            raise SystemExit(0) from error
        logger.warning("this point cannot run, and is dropped: %s", error)
        raise det.InvalidHP(str(error)) from error


def _task(
    hparams: dict[str, Any] | None, exp_conf: dict[str, Any] | None, experiment: Experiment | None
) -> Task:
    info = cluster_info()
    if info is not None and info.task_type == "TRIAL":
        trial = info.trial
        return task_of_cluster(
            trial.hparams, trial._config, seed=trial.trial_seed, steps_completed=trial._steps_completed
        )
    if experiment is not None:
        hyperparameters = experiment.hyperparameters
        return Task(hyperparameters=hyperparameters, exp_conf=experiment.config, seed=experiment.trial_seed)
    given = ((exp_conf or {}).get("reproducibility") or {}).get("experiment_seed")
    seed = stated_seed(hparams or {}, first_trial_seed(int(given or 0)))
    return Task(hyperparameters=hyperparameters_of(hparams), exp_conf=exp_conf, seed=seed)


def _run_dir(run_dir: str | os.PathLike[str] | None, distributed: core.DistributedContext) -> str:
    if run_dir is not None:
        return os.fspath(run_dir)
    made = tempfile.mkdtemp(prefix="determined_ds-") if distributed.rank == 0 else None
    return str(distributed.broadcast(made))


@contextlib.contextmanager
def _core_context(
    task: Task, run_dir: Path, distributed: core.DistributedContext, *, storage: bool
) -> Iterator[core.Context]:
    with contextlib.ExitStack() as stack:
        if task.on_cluster:
            yield stack.enter_context(cluster_core_context(distributed))
            return
        run = script_run()
        report = run.report if run is not None else None
        if report is None and REPORT in os.environ and distributed.rank == 0:
            from determined_ds.runtime.master.unmanaged import reported

            report = stack.enter_context(reported(run_dir, task.exp_conf or {}, task.hyperparameters.data))
        yield stack.enter_context(
            local_core_context(
                run_dir,
                distributed,
                metric=task.metric,
                smaller_is_better=task.smaller_is_better,
                storage_config=(task.exp_conf or {}).get("checkpoint_storage") if storage else None,
                report=report,
            )
        )


def _resolve(task: Task, distributed: core.DistributedContext, accelerator: Accelerator) -> ResolvedConfig:
    if task.on_cluster and task.slots not in (None, distributed.size):
        message = f"{distributed.size} rank{' was' if distributed.size == 1 else 's were'} started for them"
        fix = "on CPU slots, set LOCAL_SIZE to the slots of a machine (startup-hook.sh does)"
        key = "resources.slots_per_trial"
        raise ConfigError(Problem(key=key, value=task.slots, message=message, fix=fix, code="ranks"))
    where = Where(
        context_dir=Path.cwd(),
        accelerator=accelerator,
        slots=distributed.size,
        slots_origin=task.slots_origin,
        machines=distributed.cross_size,
    )
    resolved = decide_task(task, where)
    if task.on_cluster and distributed.rank == 0:  # off-cluster, the launcher has shown them
        for warning in resolved.warnings:
            logger.warning("%s", warning)
    return resolved


def _write_ds_config(run_dir: RunDir, resolved: ResolvedConfig, distributed: core.DistributedContext) -> Path:
    """Write the mapping that DeepSpeed is given, once a machine."""
    folder = run_dir.current(run_dir.path)
    path = RunDir(folder).deepspeed_config
    if distributed.local_rank == 0:
        make_private(folder)
        write_whole(path, json.dumps(resolved.ds_config, indent=2) + "\n")
    return Path(str(distributed.broadcast_local(str(path))))
