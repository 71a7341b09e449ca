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

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.devices import detect_accelerator
from determined_ds.errors import ConfigError
from determined_ds.experiment.space import draw_trial_seed, master_random
from determined_ds.logs.tensorboard import upload, upload_last
from determined_ds.rundir.records import read_faults
from determined_ds.rundir.run_dir import RunDir
from determined_ds.train.context import DeepSpeedTrialContext
from determined_ds.train.data.seeds import seed_everything
from determined_ds.train.group.process_group import TorchDistributedContext, as_chief, join_process_group
from determined_ds.train.group.watch import leave_watch
from determined_ds.train.local_core import local_core_context
from determined_ds.train.rank import Here, cluster_info, here, run_here, show_own_errors

logger = logging.getLogger("determined_ds")


@contextlib.contextmanager
def open_context(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
    run_dir: str | os.PathLike[str] | None = None,
    accelerator: str | None = None,
    engine: str = "deepspeed",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    trains: bool = True,
) -> Iterator[DeepSpeedTrialContext]:
    """Open a context for a ``DeepSpeedTrial``, on a cluster or off it, on CPUs or GPUs.

    The first four arguments are those of Determined's ``deepspeed.init``. On a cluster, and under ``det-ds run``, what
    is trained is taken from the trial's experiment instead.

    Args:
        hparams: Hyperparameters of the trial. Where they leave the batch open, it is that of the first engine that
            the trial wraps.
        exp_conf: Experiment configuration, for ``context.get_experiment_config()``.
        distributed: The ranks, if they were counted already.
        enable_tensorboard_logging: Whether to write metrics for TensorBoard too.
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
    is_stated, run = trial is not None or hparams is not None, run_here()
    if trial is None:
        reproducibility = (exp_conf or {}).get("reproducibility") or {}
        drawn = draw_trial_seed(master_random(int(reproducibility.get("experiment_seed") or 0)))
        trial = Here.of_mappings(hparams, exp_conf, drawn)
    if run is not None:
        run.listens, checkpoint_dir = True, None
        run_dir, accelerator = run_dir or run.run_dir, accelerator or run.accelerator
        trains = trains and run.measurement is None
    devices = detect_accelerator(accelerator)
    # The ranks by one transport, torch's process group, whatever others a script has opened.
    ranks = distributed if isinstance(distributed, TorchDistributedContext) else join_process_group(devices)
    with contextlib.ExitStack() as stack:
        if trial.on_cluster:
            from determined_ds.cluster.core_context import cluster_core_context, faults_on_master

            there, to_tools = RunDir(Path(tempfile.mkdtemp())), dict[str, Any](info=cluster_info())
            core_context = stack.enter_context(cluster_core_context(ranks))
        else:
            if run_dir is None:
                run_dir = ranks.broadcast(
                    tempfile.mkdtemp(prefix="determined_ds-") if ranks.rank == 0 else None
                )
            there = RunDir(Path(run_dir))
            to_tools = {"run_dir": there}
            folder = None if checkpoint_dir is None else Path(checkpoint_dir)
            core_context = local_core_context(trial, there.path, ranks, stack, checkpoint_dir=folder)
        try:
            trial.check_ranks(ranks.size)
            there_are = (
                partial(faults_on_master, core_context)
                if trial.on_cluster
                else partial(read_faults, there.recoveries)
            )
            faults = as_chief(ranks, there_are)
            if trial.on_cluster and faults.all:  # elsewhere its launcher does the same
                where = {"ranks": ranks.size, "machines": ranks.cross_size}
                trial = trial.after(faults, lambda then: then.resolve(devices, **where))
            resolved: ResolvedConfig | ConfigError
            try:
                resolved = trial.resolve(devices, ranks=ranks.size, machines=ranks.cross_size)
                if trial.on_cluster and ranks.rank == 0:  # off-cluster, the launcher has shown them
                    for warning in resolved.warnings:
                        logger.warning("%s", warning)
                resolved = resolved.writing_in(str(core_context.train.get_tensorboard_path()))
            except ConfigError as error:
                # The trial's first engine may say the batch, and without a DeepSpeed JSON its division too.
                names_json = trial.hyperparameters.get(("deepspeed_config",)) is not None
                left_open = ("batch-missing",) if names_json else ("batch-missing", "batch")
                if any(problem.code not in left_open for problem in error.problems):
                    raise
                resolved = error
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
            context.engine, context.faults, context.resumed_from = engine, faults, trial.latest_checkpoint
            with contextlib.ExitStack() as reporting:
                if trial.on_cluster:
                    # Once the tools have ended, whose files are beside those for TensorBoard.
                    reporting.callback(upload_last, core_context.train, partial(upload, context))
                if trains and trial.hyperparameters.get(("logging",)) is not None:
                    from determined_ds.logs.reporting import reported_to_tools

                    decided = {"resolved": lambda: context.resolved, **to_tools}
                    reporting.enter_context(reported_to_tools(core_context, trial, devices, **decided))
                yield context
                leave_watch()  # a rank that fails shows signs of life to its end
        except ConfigError as error:
            if not trial.drops_point(error):
                raise
            if ranks.rank != 0:
                raise SystemExit(0) from error
            logger.warning("this point cannot run, and is dropped: %s", error)
            raise det.InvalidHP(str(error)) from error  # which the core context reports to the searcher


def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
) -> contextlib.AbstractContextManager[DeepSpeedTrialContext]:
    """Open a context as ``determined.pytorch.deepspeed.init`` does, with its arguments; see :func:`open_context`.

    Off-cluster, checkpoints go where Determined puts them too (``~/.local/share/determined`` on Linux), and everything
    else to a new temporary folder.
    """
    if run_here() is None and cluster_info() is None:  # elsewhere our launcher or the task's log shows them
        show_own_errors()
    return open_context(
        hparams=hparams,
        exp_conf=exp_conf,
        distributed=distributed,
        enable_tensorboard_logging=enable_tensorboard_logging,
        # Source: _dummy_init in determined 0.38.1's core/_context.py.
        checkpoint_dir=appdirs.user_data_dir("determined"),
    )
