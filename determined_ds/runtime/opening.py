"""Opening a context, on a cluster or off it."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import determined as det
from determined import core

from determined_ds.config.layout import Accelerator
from determined_ds.config.params import stated_seed
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.devices import detect_accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Task, decide_task, hyperparameters_of, task_of_cluster
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space import first_trial_seed
from determined_ds.protocol.handed_on import REPORT
from determined_ds.protocol.run_dir import RunDir
from determined_ds.runtime.checkpoints.finding import determineds_folder
from determined_ds.runtime.context import DeepSpeedTrialContext
from determined_ds.runtime.data.seeds import seed_everything
from determined_ds.runtime.group.distributed import TorchDistributedContext, join_process_group
from determined_ds.runtime.group.peers import leave_peers
from determined_ds.runtime.local_core import local_core_context
from determined_ds.runtime.logs.attached import reported_to_tools
from determined_ds.runtime.master.core_context import cluster_core_context
from determined_ds.runtime.scripts.cluster_info import cluster_info
from determined_ds.runtime.scripts.given_run import script_run
from determined_ds.runtime.tensorboard_files import upload, upload_last
from determined_ds.runtime.tracebacks import show_own_errors

logger = logging.getLogger("determined_ds")


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
    checkpoint_dir: str | os.PathLike[str] | None = None,
    trains: bool = True,
) -> Iterator[DeepSpeedTrialContext]:
    """Open a context for a ``DeepSpeedTrial``, on a cluster or off it, on CPUs or GPUs.

    The first four arguments are those of Determined's ``deepspeed.init``, see :func:`init`. On a cluster everything is
    taken from the cluster's information about the trial.

    Args:
        hparams: Hyperparameters of the trial. Where they leave the batch open, it is that of the first engine that
            the trial wraps.
        exp_conf: Experiment configuration, for ``context.get_experiment_config()``.
        distributed: The ranks, if they were counted already; a context of Determined's must agree with the
            environment.
        enable_tensorboard_logging: Whether to write metrics for TensorBoard too.
        experiment: A loaded experiment, instead of ``hparams`` and ``exp_conf``.
        run_dir: For metrics, checkpoints and TensorBoard files, off-cluster; a new temporary folder if None.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.
        engine: ``deepspeed``, or ``ddp`` to train by torch's own DistributedDataParallel.
        checkpoint_dir: For checkpoints beside those of other runs, off-cluster; None: ``checkpoints`` in ``run_dir``.
        trains: Whether reports go to the tools of ``hyperparameters.logging`` too.

    Yields:
        The context, until the block ends.

    Raises:
        ConfigError: the configuration cannot run. On a cluster, for a point of a hyperparameter search, the
            process ends as ``det.InvalidHP`` does instead, so that the searcher drops the point.
    """
    run = script_run()
    if run is not None:  # the script's experiment, as on a cluster
        run.listens = True
        experiment, run_dir, checkpoint_dir = run.experiment, run_dir or run.run_dir, None
        accelerator = accelerator or run.accelerator
    task = _task(hparams, exp_conf, experiment)
    devices = detect_accelerator(accelerator)
    ranks = _ranks(distributed, devices)
    folder = Path(tempfile.mkdtemp() if task.on_cluster else _run_dir(run_dir, ranks))
    with (
        _core_context(task, folder, ranks, checkpoint_dir=checkpoint_dir) as core_context,
        _dropping_points(task, ranks),
    ):
        context = _context(task, core_context, devices, RunDir(folder), enable_tensorboard_logging)
        context.engine = engine
        context.resets_optimizer = run is not None and run.resets_optimizer
        with _uploaded_at_last(context, task), _to_tools(context, task, devices, trains=trains):
            yield context
            leave_peers()  # a rank that fails shows signs of life to its end


@contextlib.contextmanager
def _uploaded_at_last(context: DeepSpeedTrialContext, task: Task) -> Iterator[None]:
    """On a cluster, upload once the tools have ended, whose files are beside those for TensorBoard."""
    try:
        yield
    finally:
        if task.on_cluster:
            upload_last(context._core.train, partial(upload, context))


def _to_tools(
    context: DeepSpeedTrialContext, task: Task, devices: Accelerator, *, trains: bool
) -> contextlib.AbstractContextManager[None]:
    run = script_run()
    if not trains or (run is not None and run.measurement is not None):
        return contextlib.nullcontext()
    return reported_to_tools(
        context._core,
        task,
        devices,
        run_dir=None if task.on_cluster else context._run_dir,
        resolved=lambda: context.resolved,
    )


def _context(
    task: Task,
    core_context: core.Context,
    accelerator: Accelerator,
    run_dir: RunDir,
    enable_tensorboard_logging: bool,
) -> DeepSpeedTrialContext:
    resolved = _resolve(task, core_context.distributed, accelerator)
    if isinstance(resolved, ResolvedConfig):
        resolved = resolved.writing_in(str(core_context.train.get_tensorboard_path()))
    seed_everything(task.seed)
    context = DeepSpeedTrialContext(
        core_context=core_context,
        resolved=resolved,
        hyperparameters=task.hyperparameters if task.has_hyperparameters else None,
        accelerator=accelerator,
        run_dir=run_dir,
        trial_seed=task.seed,
        exp_conf=task.exp_conf,
        steps_completed=task.steps_completed,
        enable_tensorboard_logging=enable_tensorboard_logging,
    )
    context.resumed_from = _latest_checkpoint(task)
    return context


@contextlib.contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
) -> Iterator[DeepSpeedTrialContext]:
    """Open a context as ``determined.pytorch.deepspeed.init`` does, with its arguments.

    Off-cluster, checkpoints go where Determined puts them too (``~/.local/share/determined`` on Linux), and everything
    else to a new temporary folder.

    Args:
        hparams: As for :func:`open_context`.
        exp_conf: As for :func:`open_context`.
        distributed: As for :func:`open_context`.
        enable_tensorboard_logging: As for :func:`open_context`.

    Yields:
        The context, until the block ends.

    Raises:
        ConfigError: the configuration cannot run.
    """
    if script_run() is None and cluster_info() is None:  # elsewhere our launcher or the task's log shows them
        show_own_errors()
    with open_context(
        hparams=hparams,
        exp_conf=exp_conf,
        distributed=distributed,
        enable_tensorboard_logging=enable_tensorboard_logging,
        checkpoint_dir=determineds_folder(),
    ) as context:
        yield context


def _ranks(given: core.DistributedContext | None, accelerator: Accelerator) -> core.DistributedContext:
    """The ranks by one transport, torch's process group, whatever others a script opened.

    Raises:
        ConfigError: ``given`` counts other ranks than the environment.
    """
    if isinstance(given, TorchDistributedContext):
        return given
    ranks = join_process_group(accelerator)
    if given is not None and (given.rank, given.size) != (ranks.rank, ranks.size):
        message = f"this process is rank {ranks.rank} of {ranks.size} by its environment (RANK, WORLD_SIZE)"
        value, fix = f"rank {given.rank} of {given.size}", "leave distributed out: the ranks are counted here"
        raise ConfigError(Problem(key="distributed", value=value, message=message, fix=fix, code="ranks"))
    return ranks


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


def _latest_checkpoint(task: Task) -> str | None:
    if (run := script_run()) is not None:
        return run.latest_checkpoint
    info = cluster_info() if task.on_cluster else None
    return None if info is None else info.latest_checkpoint or None


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
    return Task(
        hyperparameters=hyperparameters_of(hparams),
        exp_conf=exp_conf,
        seed=seed,
        has_hyperparameters=hparams is not None,
    )


def _run_dir(run_dir: str | os.PathLike[str] | None, distributed: core.DistributedContext) -> str:
    if run_dir is not None:
        return os.fspath(run_dir)
    made = tempfile.mkdtemp(prefix="determined_ds-") if distributed.rank == 0 else None
    return str(distributed.broadcast(made))


@contextlib.contextmanager
def _core_context(
    task: Task,
    run_dir: Path,
    distributed: core.DistributedContext,
    *,
    checkpoint_dir: str | os.PathLike[str] | None,
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
                report=report,
                checkpoint_dir=None if checkpoint_dir is None else Path(checkpoint_dir),
            )
        )


def _resolve(
    task: Task, distributed: core.DistributedContext, accelerator: Accelerator
) -> ResolvedConfig | ConfigError:
    """What will run; why that is open, where the trial's first engine can say it."""
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
    try:
        resolved = decide_task(task, where)
    except ConfigError as error:
        if _left_open(task, error):
            return error
        raise
    if task.on_cluster and distributed.rank == 0:  # off-cluster, the launcher has shown them
        for warning in resolved.warnings:
            logger.warning("%s", warning)
    return resolved


def _left_open(task: Task, error: ConfigError) -> bool:
    """Whether the batch alone is not determined, or cannot be without the layout of an engine."""
    names_json = task.hyperparameters.get(("deepspeed_config",)) is not None
    open_codes = ("batch-missing",) if names_json else ("batch-missing", "batch")
    return all(problem.code in open_codes for problem in error.problems)
