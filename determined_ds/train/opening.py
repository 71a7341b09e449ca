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

import appdirs
import determined as det
from determined import core

from determined_ds.config.layout import Accelerator
from determined_ds.config.params import stated_seed
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.devices import detect_accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space import draw_trial_seed, master_random
from determined_ds.logs.tensorboard import upload, upload_last
from determined_ds.rundir.run_dir import RunDir
from determined_ds.train.context import DeepSpeedTrialContext
from determined_ds.train.data.seeds import seed_everything
from determined_ds.train.group.process_group import TorchDistributedContext, join_process_group
from determined_ds.train.group.watch import leave_watch
from determined_ds.train.here import Here, cluster_info, here, hyperparameters_of, script_run
from determined_ds.train.local_core import local_core_context, master_report
from determined_ds.train.rank_process import show_own_errors

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
    trial = here()
    run = trial.run if trial is not None else None
    if run is not None:  # the script's experiment, as on a cluster
        run.listens = True
        run_dir, checkpoint_dir = run_dir or run.run_dir, None
        accelerator = accelerator or run.accelerator
        trains = trains and run.measurement is None
    is_stated = trial is not None or experiment is not None or hparams is not None
    if trial is None and experiment is not None:
        trial = Here.of(experiment)
    elif trial is None:
        reproducibility = (exp_conf or {}).get("reproducibility") or {}
        drawn = draw_trial_seed(master_random(int(reproducibility.get("experiment_seed") or 0)))
        seed = stated_seed(hparams or {}, drawn)
        trial = Here(hyperparameters=hyperparameters_of(hparams), exp_conf=exp_conf, seed=seed)
    devices = detect_accelerator(accelerator)
    ranks = _ranks(distributed, devices)
    with contextlib.ExitStack() as stack:
        if trial.on_cluster:
            from determined_ds.cluster.core_context import cluster_core_context

            there, to_tools = RunDir(Path(tempfile.mkdtemp())), dict[str, Any](info=cluster_info())
            core_context = stack.enter_context(cluster_core_context(ranks))
        else:
            if run_dir is None:
                new = tempfile.mkdtemp(prefix="determined_ds-") if ranks.rank == 0 else None
                run_dir = ranks.broadcast(new)
            there = RunDir(Path(run_dir))
            to_tools = {"run_dir": there}
            report = run.report if run is not None else None
            if report is None:
                about = (trial.exp_conf or {}, trial.hyperparameters.data, ranks.rank)
                report = stack.enter_context(master_report(there.path, *about))
            folder = None if checkpoint_dir is None else Path(checkpoint_dir)
            core_context = local_core_context(
                there.path, ranks, trial.searcher, report=report, checkpoint_dir=folder
            )
        stack.enter_context(_dropping_points(trial, ranks))
        resolved = _resolve(trial, ranks, devices)
        if isinstance(resolved, ResolvedConfig):
            resolved = resolved.writing_in(str(core_context.train.get_tensorboard_path()))
        seed_everything(trial.seed)
        context = DeepSpeedTrialContext(
            core_context=core_context,
            resolved=resolved,
            hyperparameters=trial.hyperparameters if is_stated else None,
            accelerator=devices,
            run_dir=there,
            trial_seed=trial.seed,
            exp_conf=trial.exp_conf,
            steps_completed=trial.steps_completed,
            enable_tensorboard_logging=enable_tensorboard_logging,
        )
        context.engine = engine
        context.resumed_from = trial.latest_checkpoint
        if trial.on_cluster:
            # Once the tools have ended, whose files are beside those for TensorBoard.
            stack.callback(upload_last, core_context.train, partial(upload, context))
        if trains and trial.hyperparameters.get(("logging",)) is not None:
            from determined_ds.logs.reporting import reported_to_tools

            about_tools = {"resolved": lambda: context.resolved, **to_tools}
            stack.enter_context(reported_to_tools(core_context, trial, devices, **about_tools))
        yield context
        leave_watch()  # a rank that fails shows signs of life to its end


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
        hparams: As for :func:`open_context`, like the others.
        exp_conf: The experiment's configuration.
        distributed: The ranks.
        enable_tensorboard_logging: Whether to write metrics for TensorBoard too.

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
        # Source: _dummy_init in determined 0.38.1's core/_context.py.
        checkpoint_dir=Path(appdirs.user_data_dir("determined")),
    ) as context:
        yield context


def _ranks(given: core.DistributedContext | None, accelerator: Accelerator) -> core.DistributedContext:
    """The ranks by one transport, torch's process group, whatever others a script opened."""
    if isinstance(given, TorchDistributedContext):
        return given
    ranks = join_process_group(accelerator)
    if given is not None and (given.rank, given.size) != (ranks.rank, ranks.size):
        message = f"this process is rank {ranks.rank} of {ranks.size} by its environment (RANK, WORLD_SIZE)"
        value, fix = f"rank {given.rank} of {given.size}", "leave distributed out: the ranks are counted here"
        raise ConfigError(Problem(key="distributed", value=value, message=message, fix=fix, code="ranks"))
    return ranks


@contextlib.contextmanager
def _dropping_points(trial: Here, ranks: core.DistributedContext) -> Iterator[None]:
    """Have a searcher drop a point that cannot run; rank 0 reports it."""
    try:
        yield
    except ConfigError as error:
        if not trial.drops_point(error):
            raise
        if ranks.rank != 0:
            raise SystemExit(0) from error
        logger.warning("this point cannot run, and is dropped: %s", error)
        raise det.InvalidHP(str(error)) from error


def _resolve(
    trial: Here, ranks: core.DistributedContext, accelerator: Accelerator
) -> ResolvedConfig | ConfigError:
    """What will run; why that is open, where the trial's first engine can say it."""
    trial.check_ranks(ranks.size)
    try:
        resolved = trial.resolve(accelerator, ranks=ranks.size, machines=ranks.cross_size)
    except ConfigError as error:
        # The batch alone may be left to an engine; without a DeepSpeed JSON its division too, by an engine's layout.
        names_json = trial.hyperparameters.get(("deepspeed_config",)) is not None
        left_open = ("batch-missing",) if names_json else ("batch-missing", "batch")
        if all(problem.code in left_open for problem in error.problems):
            return error
        raise
    if trial.on_cluster and ranks.rank == 0:  # off-cluster, the launcher has shown them
        for warning in resolved.warnings:
            logger.warning("%s", warning)
    return resolved
