"""A training's reports sent to the tools of its configuration: where every way of training begins that."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from determined import core

from determined_ds.config.layout import Accelerator
from determined_ds.config.loggers import read_loggers
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.devices import detect_accelerator
from determined_ds.experiment.decide import Task
from determined_ds.rundir.launches import RESTART, START, Launch, decided_fields, launch_of, read_launches
from determined_ds.rundir.run_dir import RunDir
from determined_ds.train.logs.identity import RunHere, RunOnCluster, shown_run
from determined_ds.train.logs.sender import TeamTools
from determined_ds.train.logs.sink import sent_on
from determined_ds.train.scripts.given_run import cluster_info, cluster_trial
from determined_ds.train.tensorboard_files import (
    OF_TOOLS,
    copy_changed,
    upload_files,
    upload_last,
    upload_too,
)


@contextlib.contextmanager
def report_to_tools(core_context: core.Context) -> Iterator[None]:
    """Send what a Core API script reports to the tools of ``hyperparameters.logging``, on a cluster too.

    Under ``det-ds run`` that is done anyway, and this does nothing::

        with det.core.init() as core_context, determined_ds.report_to_tools(core_context):
            ...

    Args:
        core_context: From ``determined.core.init``.

    Yields:
        While the script trains.
    """
    task, train = cluster_trial(), core_context.train
    if task is None:
        yield
        return
    is_manual = getattr(train, "_tensorboard_mode", None) == core.TensorboardMode.MANUAL
    with contextlib.ExitStack() as stack:
        if (
            is_manual and core_context.distributed.rank == 0
        ):  # else Determined does when it closes the context
            stack.callback(upload_last, train, partial(upload_files, train, 0))
        stack.enter_context(reported_to_tools(core_context, task, detect_accelerator(None)))
        yield


@contextlib.contextmanager
def reported_to_tools(
    core_context: core.Context,
    task: Task,
    accelerator: Accelerator,
    *,
    run_dir: RunDir | None = None,
    resolved: Callable[[], ResolvedConfig | None] = lambda: None,
) -> Iterator[None]:
    """Within, what is reported to a core context goes to the tools of ``hyperparameters.logging`` too.

    Args:
        core_context: Of this rank; only rank 0 sends.
        task: What is trained.
        accelerator: What the ranks compute on.
        run_dir: Of a run off a cluster.
        resolved: Says what was decided, once training begins; None where the code has decided it.
    """
    tools = read_loggers(task.hyperparameters, [])
    if core_context.distributed.rank != 0 or not tools:
        yield
        return
    launch = partial(_launch, task, accelerator, run_dir, resolved, core_context.distributed.size)
    if run_dir is not None:
        about = partial(shown_run, run=RunHere(there=run_dir), folder=run_dir.path)
        log = run_dir.logs / "logging.log"
        log.parent.mkdir(exist_ok=True)
    else:
        folder = Path(tempfile.mkdtemp())
        upload_too(core_context.train, folder)
        about = partial(shown_run, run=RunOnCluster(info=cluster_info()), folder=folder)
        log = folder / "logging.log"
    sink = TeamTools(partial(about, exp_conf=task.exp_conf or {}, tools=tools), log)
    try:
        with sent_on(core_context, [sink], launch):
            yield
    finally:
        if run_dir is None:  # a context that uploads by itself does so when it is closed
            copy_changed(log.parent, Path(core_context.train.get_tensorboard_path()) / OF_TOOLS)


def _launch(
    task: Task,
    accelerator: Accelerator,
    run_dir: RunDir | None,
    resolved: Callable[[], ResolvedConfig | None],
    size: int,
) -> Launch:
    """What the launcher has written of this start of the ranks; on a cluster this writes it."""
    written = read_launches(run_dir.current(run_dir.launches)) if run_dir is not None else ()
    decided = resolved()
    if written:
        by_code = not written[-1].strategy and decided is not None  # known by now
        return replace(written[-1], **decided_fields(decided)) if by_code and decided else written[-1]
    config, info = task.exp_conf or {}, cluster_info()
    is_again = info is not None and task.on_cluster and info.trial._trial_run_id > 1
    return launch_of(
        name=str(config.get("name") or ""),
        runs=str(config.get("entrypoint") or ""),
        hyperparameters=task.hyperparameters.data,
        resolved=decided,
        accelerator=accelerator,
        slots=size,
        trial_seed=task.seed,
        kind=RESTART if is_again else START,
        steps_completed=task.steps_completed if is_again else 0,
    )
