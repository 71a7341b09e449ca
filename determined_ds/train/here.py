"""What this process trains: a script that ``det-ds run`` has started, or a trial of a cluster. Loads no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.config.params import ProfiledSteps, stated_seed
from determined_ds.experiment.decide import Task, hyperparameters_of
from determined_ds.experiment.experiment import Experiment
from determined_ds.rundir.records import relink
from determined_ds.rundir.run_dir import RunDir
from determined_ds.rundir.signals import TRAINED

if TYPE_CHECKING:
    import determined as det
    from determined import core


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How many steps are measured."""

    steps: int  # whose time counts, >= 1
    warmup: int  # before them, >= 0
    profiles: bool = False  # by torch's profiler too

    @property
    def total(self) -> int:
        """Steps that are trained."""
        return self.warmup + self.steps

    @property
    def profile(self) -> ProfiledSteps | None:
        """The steps that are recorded."""
        warmup = min(2, self.warmup)
        wait = self.warmup - warmup
        return ProfiledSteps(wait=wait, warmup=warmup, active=self.steps) if self.profiles else None


@dataclass(kw_only=True)
class ScriptRun:
    """A run of ``det-ds run`` whose ranks are a script."""

    run_dir: Path
    experiment: Experiment  # one point, overrides included
    accelerator: str | None = None  # cpu or cuda
    test: bool = False  # one batch is trained, one validated, one checkpoint verified
    resume: str | None = None  # uuid of the checkpoint to resume from
    resume_from: Path | None = None  # its folder, where it is another run's
    fork: Path | None = None  # of a checkpoint of another run, to start from
    measurement: Measurement | None = None  # instead of training to its end
    listens: bool = False  # it has a context, which hears of a stop; one without is ended by the first signal
    report: Any = None  # rank 0's, to a master
    trained: bool = False  # a loop of this library has trained, and so has done what ``test`` requests
    is_measured: bool = False

    @property
    def there(self) -> RunDir:
        """The files of the run."""
        return RunDir(self.run_dir)

    @property
    def latest_checkpoint(self) -> str | None:
        """What a loop of this library resumes from: a uuid, or a folder."""
        return self.resume if self.resume_from is None else str(self.resume_from)

    @property
    def has_begun(self) -> bool:
        """Whether this launch has reported anything."""
        with contextlib.suppress(OSError):
            return self.there.is_replaced and self.there.metrics.stat().st_size > 0
        return False

    def begun(self) -> None:
        """The script reports: a run that resumes has taken over by now."""
        TRAINED.set()
        if self.there.adopt_next():
            relink(self.there)


_run: ScriptRun | None = None


def script_run() -> ScriptRun | None:
    """The run that this process is a rank of; None in any other process, and where a trial is trained."""
    return _run


def begin(run: ScriptRun | None) -> None:
    """From now on this process is a rank of a run; None: of no run any more."""
    global _run
    _run = run


def cluster_info() -> det.ClusterInfo | None:
    """What ``det.get_cluster_info()`` says on a cluster; None elsewhere, under ``det-ds run`` too."""
    import determined as det

    return None if _run is not None else det.get_cluster_info()


@dataclass(frozen=True, kw_only=True)
class Here:
    """The trial that this process trains."""

    task: Task
    latest_checkpoint: str | None  # to resume from: a uuid, or the folder of another run's
    run: ScriptRun | None  # None on a cluster


def here() -> Here | None:
    """The trial of this process: of a run, or of a cluster; None under a plain launcher.

    Raises:
        ConfigError: a secret of its configuration was not filled in.
    """
    if _run is not None:
        return Here(task=task_of(_run.experiment), latest_checkpoint=_run.latest_checkpoint, run=_run)
    info = cluster_info()
    if info is None or info.task_type != "TRIAL":
        return None
    trial = info.trial
    task = Task(
        hyperparameters=hyperparameters_of(trial.hparams),
        exp_conf=trial._config,
        seed=stated_seed(trial.hparams, trial.trial_seed),
        steps_completed=trial._steps_completed,
        on_cluster=True,
    )
    return Here(task=task, latest_checkpoint=info.latest_checkpoint or None, run=None)


def task_of(experiment: Experiment) -> Task:
    """What a run of an experiment trains, off a cluster."""
    hyperparameters, seed = experiment.hyperparameters, experiment.trial_seed
    return Task(hyperparameters=hyperparameters, exp_conf=experiment.config, seed=seed)


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
    from determined import core

    from determined_ds.devices import detect_accelerator
    from determined_ds.logs.reporting import reported_to_tools
    from determined_ds.logs.tensorboard import upload_files, upload_last

    trial, train = here(), core_context.train
    if trial is None or not trial.task.on_cluster:
        yield
        return
    is_manual = getattr(train, "_tensorboard_mode", None) == core.TensorboardMode.MANUAL
    with contextlib.ExitStack() as stack:
        if is_manual and core_context.distributed.rank == 0:  # else Determined does, closing the context
            stack.callback(upload_last, train, partial(upload_files, train, 0))
        stack.enter_context(
            reported_to_tools(core_context, trial.task, detect_accelerator(None), info=cluster_info())
        )
        yield
