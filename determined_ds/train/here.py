"""What this process trains: a script that ``det-ds run`` has started, or a trial of a cluster. Loads no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.config.layout import Accelerator
from determined_ds.config.params import ProfiledSteps, stated_seed
from determined_ds.config.resolve import ResolvedConfig, Where, missing_packages, resolve
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, DataError, Problem, TrialError
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.secrets import secret_problems
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
    """What this process trains, whatever it was read from, and where.

    Args:
        hyperparameters: One point of the search space.
        exp_conf: The experiment's configuration, where there is one.
        seed: Of the trial.
        steps_completed: By the processes before.
        on_cluster: Whether a cluster runs it.
        latest_checkpoint: To resume from: a uuid, or the folder of another run's.
        run: The run of a script; None on a cluster, and where a trial is trained.

    Raises:
        ConfigError: a cluster runs it, and a secret of the configuration was not filled in.
    """

    hyperparameters: Document
    exp_conf: dict[str, Any] | None
    seed: int
    steps_completed: int = 0
    on_cluster: bool = False
    latest_checkpoint: str | None = None
    run: ScriptRun | None = None

    def __post_init__(self) -> None:
        stated = Document(name="the experiment", data=self.exp_conf or {})
        left = [each for each in secret_problems(stated) if each.code == "secret-missing"]
        if self.on_cluster and left:  # it would take them for the values
            raise ConfigError(left)

    @classmethod
    def of(cls, experiment: Experiment, run: ScriptRun | None = None) -> Here:
        """What a run of an experiment trains, off a cluster."""
        return cls(
            hyperparameters=experiment.hyperparameters,
            exp_conf=experiment.config,
            seed=experiment.trial_seed,
            latest_checkpoint=run.latest_checkpoint if run is not None else None,
            run=run,
        )

    @property
    def searcher(self) -> dict[str, Any]:
        """What the experiment's ``searcher`` states: a master writes null for what it does not."""
        stated = (self.exp_conf or {}).get("searcher") or {}
        return {key: value for key, value in stated.items() if value is not None}

    def drops_point(self, error: BaseException) -> bool:
        """Whether the searcher should drop this point because of an error, since another point may run."""
        is_search = self.on_cluster and self.searcher.get("name", "single") != "single"
        return is_search and isinstance(error, ConfigError) and not isinstance(error, (DataError, TrialError))

    def check_ranks(self, size: int) -> None:
        """Refuse other ranks than the experiment requests of a cluster.

        Raises:
            ConfigError: they are not ``resources.slots_per_trial``.
        """
        slots = ((self.exp_conf or {}).get("resources") or {}).get("slots_per_trial")
        # Of none, one process runs all the same.
        if self.on_cluster and isinstance(slots, int) and max(1, slots) != size:
            message = f"{size} rank{' was' if size == 1 else 's were'} started for them"
            fix = "start them with python3 -m determined.launch.torch_distributed; or, on CPU slots, set LOCAL_SIZE "
            fix += "to the slots of a machine (startup-hook.sh does)"
            key = "resources.slots_per_trial"
            raise ConfigError(Problem(key=key, value=slots, message=message, fix=fix, code="ranks"))

    def resolve(self, accelerator: Accelerator, *, ranks: int, machines: int) -> ResolvedConfig:
        """What will run; paths in the hyperparameters are relative to the current directory.

        Args:
            accelerator: What the ranks compute on.
            ranks: That are started, in all.
            machines: That they are spread over.

        Raises:
            ConfigError: every reason why it cannot run.
        """
        origin = "resources.slots_per_trial" if self.on_cluster else "the launched ranks"
        where = Where(
            context_dir=Path.cwd(),
            accelerator=accelerator,
            slots=ranks,
            slots_origin=origin,
            machines=machines,
        )
        resolved = resolve(self.hyperparameters, where)
        if missing := missing_packages(self.hyperparameters):
            raise ConfigError(missing)
        return resolved


def hyperparameters_of(hparams: Mapping[str, Any] | None) -> Document:
    """Hyperparameters that come from no file."""
    return Document(name="hyperparameters", data=dict(hparams or {}), prefix="hyperparameters")


def here() -> Here | None:
    """The trial of this process: of a script's run, or of a cluster; None under a plain launcher.

    Raises:
        ConfigError: a secret of its configuration was not filled in.
    """
    if _run is not None:
        return Here.of(_run.experiment, _run)
    info = cluster_info()
    if info is None or info.task_type != "TRIAL":
        return None
    trial = info.trial
    return Here(
        hyperparameters=hyperparameters_of(trial.hparams),
        exp_conf=trial._config,
        seed=stated_seed(trial.hparams, trial.trial_seed),
        steps_completed=trial._steps_completed,
        on_cluster=True,
        latest_checkpoint=info.latest_checkpoint or None,
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
    from determined import core

    from determined_ds.devices import detect_accelerator
    from determined_ds.logs.reporting import reported_to_tools
    from determined_ds.logs.tensorboard import upload_files, upload_last

    trial, train = here(), core_context.train
    if trial is None or not trial.on_cluster:
        yield
        return
    is_manual = getattr(train, "_tensorboard_mode", None) == core.TensorboardMode.MANUAL
    with contextlib.ExitStack() as stack:
        if is_manual and core_context.distributed.rank == 0:  # else Determined does, closing the context
            stack.callback(upload_last, train, partial(upload_files, train, 0))
        stack.enter_context(
            reported_to_tools(core_context, trial, detect_accelerator(None), info=cluster_info())
        )
        yield
