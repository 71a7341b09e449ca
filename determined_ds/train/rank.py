"""This process as a rank: what it trains, how it listens to its launcher, and why it ends. Loads no torch.

``det-ds run`` starts it with the options of :func:`rank_parser`, from which its :class:`Run` is read; a cluster starts
it in a task. Both are one :class:`Here` to whatever trains.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from determined_ds.cluster import log
from determined_ds.config.layout import Accelerator
from determined_ds.config.params import stated_seed
from determined_ds.config.resolve import ResolvedConfig, Where, missing_packages, resolve
from determined_ds.documents.document import Document
from determined_ds.errors import (
    EXIT_CRASHED,
    EXIT_TRAINING_FAILED,
    ChiefFailed,
    ConfigError,
    DataError,
    DeterminedDSError,
    Problem,
    SpikeError,
    TrialError,
    lines_of_error,
)
from determined_ds.experiment.experiment import Experiment, load_experiment
from determined_ds.experiment.secrets import secret_problems
from determined_ds.rundir.handed_on import LAUNCHED_BY, PARENT, copy_to_terminal, report_failure
from determined_ds.rundir.limits import chain, exhausted
from determined_ds.rundir.records import (
    CONFIGURATION,
    CRASH,
    ERROR,
    HOST_MEMORY,
    LOST_MACHINE,
    OUT_OF_MEMORY,
    SPIKE,
    Faults,
    relink,
)
from determined_ds.rundir.run_dir import EXPERIMENT, RunDir
from determined_ds.rundir.signals import (
    STOP,
    TRAINED,
    die_with_parent,
    end_with,
    outlive_readers,
    stop_on_signal,
)
from determined_ds.train.group.watch import leave_watch

if TYPE_CHECKING:
    import determined as det
    from determined import core

# ------------------------------------------------------------------------------------------- what it trains


class Measurement(NamedTuple):
    """How many steps are measured."""

    steps: int  # whose time counts, >= 1
    warmup: int  # before them, >= 0
    profiles: bool = False  # by torch's profiler too


@dataclass(kw_only=True)
class Run:
    """A run off a cluster that this process is a rank of, of a trial or a script."""

    run_dir: Path
    experiment: Experiment  # one point, overrides included
    accelerator: str | None = None  # cpu or cuda
    test: bool = False  # one batch is trained, one validated, one checkpoint verified
    resume: str | None = None  # the uuid of a checkpoint to resume from, or the folder of another run's
    fork: Path | None = None  # of a checkpoint of another run, to start from
    measurement: Measurement | None = None  # instead of training to its end
    listens: bool = False  # a context hears of a stop: until then the first signal ends a script
    trained: bool = False  # a loop of this library has trained, and so has done what ``test`` requests
    is_measured: bool = False

    @classmethod
    def of(cls, options: argparse.Namespace) -> Run:
        """The run that the options of a rank describe."""
        there = RunDir(options.run_dir)
        run = cls(
            run_dir=options.run_dir,
            experiment=load_experiment(there.current(there.experiment), name=EXPERIMENT),
            accelerator=options.accelerator,
            test=options.test,
        )
        if options.measure is None:
            run.resume, run.fork = options.resume, options.fork
        else:  # what is measured is trained from fresh weights
            run.measurement = Measurement(options.measure, options.warmup, options.profile)
        return run

    @property
    def there(self) -> RunDir:
        """The files of the run."""
        return RunDir(self.run_dir)

    def begun(self) -> None:
        """A script reports: a run that resumes has taken over by now."""
        TRAINED.set()
        if self.there.adopt_next():
            relink(self.there)


_run: Run | None = None


def run_here() -> Run | None:
    """The run that this process is a rank of; None in any other process, and on a cluster."""
    return _run


def begin(run: Run | None) -> None:
    """From now on this process is a rank of a run; None: of no run any more."""
    global _run
    _run = run


def cluster_info() -> det.ClusterInfo | None:
    """What ``det.get_cluster_info()`` says on a cluster; None elsewhere, under ``det-ds run`` too."""
    import determined as det

    return None if _run is not None else det.get_cluster_info()


@dataclass(frozen=True, kw_only=True)
class Here:
    """What this process trains, whatever it was read from, and where."""

    hyperparameters: Document  # one point of the search space
    exp_conf: dict[str, Any] | None  # the experiment's configuration, where there is one
    seed: int  # of the trial
    steps_completed: int = 0  # by the processes before
    on_cluster: bool = False
    latest_checkpoint: str | None = None  # to resume from: a uuid, or the folder of another run's
    run: Run | None = None  # None on a cluster, and under a launcher that is not ours

    def __post_init__(self) -> None:
        stated = Document(name="the experiment", data=self.exp_conf or {})
        left = [each for each in secret_problems(stated) if each.code == "secret-missing"]
        if self.on_cluster and left:  # which were not filled in, and would be taken for the values
            raise ConfigError(left)

    @classmethod
    def of_mappings(
        cls, hparams: Mapping[str, Any] | None, exp_conf: dict[str, Any] | None, drawn_seed: int, **more: Any
    ) -> Here:
        """What is read from no file; the drawn seed holds where the hyperparameters state none."""
        document = Document(name="hyperparameters", data=dict(hparams or {}), prefix="hyperparameters")
        seed = stated_seed(hparams or {}, drawn_seed)
        return cls(hyperparameters=document, exp_conf=exp_conf, seed=seed, **more)

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
        """Refuse other ranks than the ``resources.slots_per_trial`` that the experiment requests of a cluster."""
        slots = ((self.exp_conf or {}).get("resources") or {}).get("slots_per_trial")
        # Of none, one process runs all the same.
        if self.on_cluster and isinstance(slots, int) and max(1, slots) != size:
            message = f"{size} rank{' was' if size == 1 else 's were'} started for them"
            fix = "start them with python3 -m determined.launch.torch_distributed; or, on CPU slots, set LOCAL_SIZE "
            fix += "to the slots of a machine (startup-hook.sh does)"
            key = "resources.slots_per_trial"
            raise ConfigError(Problem(key=key, value=slots, message=message, fix=fix, code="ranks"))

    def after(self, faults: Faults, resolve: Callable[[Here], ResolvedConfig]) -> Here:
        """What a trial of a cluster trains after the faults of its earlier starts.

        Raises:
            ConfigError: no smaller micro-batch can run; it cannot go back to where it began.
        """
        from determined_ds.rundir.recoveries import with_smaller_batch

        smaller = with_smaller_batch(
            self.hyperparameters,
            faults.too_large,
            lambda point: resolve(replace(self, hyperparameters=point)),
        )
        back, source = (
            faults.goes_back(self.latest_checkpoint or ""),
            self.searcher.get("source_checkpoint_uuid"),
        )
        if back == "" and self.searcher.get("source_trial_id") is not None:
            message, fix = (
                "began with another trial, and goes back to its start",
                "state source_checkpoint_uuid",
            )
            raise ConfigError(
                Problem(key="searcher.source_trial_id", message=message, fix=fix, code="recovery")
            )
        latest = self.latest_checkpoint if back is None else back or source
        return replace(self, hyperparameters=smaller, latest_checkpoint=latest)

    def resolve(self, accelerator: Accelerator, *, ranks: int, machines: int) -> ResolvedConfig:
        """What will run, or every reason why it cannot; paths are relative to the current directory."""
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


def here() -> Here | None:
    """What this process trains: a run's, or a cluster's trial; None under a launcher that is not ours."""
    if _run is not None:
        return Here(
            hyperparameters=_run.experiment.hyperparameters,
            exp_conf=_run.experiment.config,
            seed=_run.experiment.trial_seed,
            latest_checkpoint=_run.resume,
            run=_run,
        )
    info = cluster_info()
    if info is None or info.task_type != "TRIAL":
        return None
    trial = info.trial
    return Here.of_mappings(
        trial.hparams,
        trial._config,
        trial.trial_seed,
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
    trial, train = here(), core_context.train
    if trial is None or not trial.on_cluster:
        yield
        return
    from determined import core

    from determined_ds.devices import detect_accelerator
    from determined_ds.logs.reporting import reported_to_tools
    from determined_ds.logs.tensorboard import upload_files, upload_last

    is_manual = getattr(train, "_tensorboard_mode", None) == core.TensorboardMode.MANUAL
    with contextlib.ExitStack() as stack:
        if is_manual and core_context.distributed.rank == 0:  # else Determined does, closing the context
            stack.callback(upload_last, train, partial(upload_files, train, 0))
        stack.enter_context(
            reported_to_tools(core_context, trial, detect_accelerator(None), info=cluster_info())
        )
        yield


# ------------------------------------------------------------------------------------------- why it ends

PACKAGE = Path(__file__).resolve().parents[1]
FIX = "raise an exception to say what is wrong, or call context.set_stop_requested(True) to end training in good order"
NOT_ENDED = f"training had not ended\n  fix: {FIX}"
# Classes, and those derived from them, of errors from outside this process: another rank, the network, the master, a
# disk or a device. The names are Python's, torch's, Determined's, and those of requests and httpx.
NOT_OURS = {
    *("ConnectionError", "TimeoutError", "Timeout", "TransportError"),
    *("AcceleratorError", "APIException", "MasterNotFoundException"),
}
ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ENETUNREACH, errno.EHOSTUNREACH)
# Errors of gloo and NCCL that torch raises as RuntimeError.
OF_OTHER_RANKS = re.compile(r"/gloo/|\bNCCL\b|closed by peer|reset by peer|connectFullMesh|Broken pipe")
ASSERTED = "device-side assert"  # an index that is out of range looks so on a GPU
# Of torch, and of cuBLAS and its sisters, which allocate memory themselves.
MEMORY = re.compile(r"(CUDA|HIP)( driver)?( error:)? out of memory|(CU|HIP)[A-Z]+_STATUS_ALLOC_FAILED")
# Of the machine's memory: torch's, numpy's, C++'s, and a data loader whose worker the kernel has killed.
OF_HOST = re.compile(
    r"(can't|cannot) allocate memory|Unable to allocate|bad_alloc|MemoryError|killed by signal: Killed",
    re.IGNORECASE,
)
# How long rank 0 may take to report what all ranks fail of: its launcher then ends the others.
APART_S = 10.0


class Ending(NamedTuple):
    """How a rank ends after an error."""

    code: int  # EXIT_CRASHED where another start may get further
    cause: str  # of determined_ds.rundir.records
    reason: str  # one sentence; of an error that is not ours it begins with the type
    used_up: str | None = None  # the message about a disk, or a limit, that is


def ending_of(error: BaseException, run_dir: Path | None = None) -> Ending:
    """How a rank whose run writes in ``run_dir`` ends after an error.

    Another start may get further after an unexpected error behind a trained batch, and after one from outside this
    process. A diagnosed error is the same the next time, unless another rank's end caused it; so is an error before
    the first trained batch.
    """
    errors = list(chain(error))
    said = [f"{type(each).__name__}: {each}" for each in errors]
    kinds = {kind.__name__ for each in errors if ASSERTED not in str(each) for kind in type(each).__mro__}
    diagnosed = isinstance(error, DeterminedDSError)
    used_up = None if diagnosed else exhausted(error, run_dir or Path.cwd())
    of_others = "DistError" in kinds or any(map(OF_OTHER_RANKS.search, said))
    out_of_memory = any(map(MEMORY.search, said)) or "OutOfMemoryError" in kinds
    from_outside = kinds & NOT_OURS or any(
        isinstance(each, OSError) and each.errno in ERRNOS for each in errors
    )
    if isinstance(error, DeterminedDSError):
        code = EXIT_CRASHED if of_others else error.exit_code
    elif out_of_memory or used_up:
        code = EXIT_TRAINING_FAILED
    else:
        code = EXIT_CRASHED if TRAINED.is_set() or of_others or from_outside else EXIT_TRAINING_FAILED
    cause = ERROR if diagnosed or used_up else CRASH
    if isinstance(error, ConfigError):
        cause = CONFIGURATION
    elif out_of_memory or any(map(OF_HOST.search, said)):
        cause = OUT_OF_MEMORY if out_of_memory else HOST_MEMORY
    elif isinstance(error, SpikeError):
        cause = SPIKE
    elif of_others:
        cause = LOST_MACHINE
    text = str(error).strip().partition("\n")[0]
    reason = text if diagnosed else f"{type(error).__name__}: {text}".removesuffix(": ")
    return Ending(code, cause, used_up or reason, used_up)


_training: Any = None  # a Trainer, while it trains


def training_begins(training: Any) -> None:
    """From now on a rank that runs out of memory is in this training; None: in no training."""
    global _training
    _training = training


def recovered(ending: Ending) -> tuple[Ending, str]:
    """How a rank ends for want of memory, with what comes next: another start may go on with smaller micro-batches."""
    if _training is None:
        return ending, ""
    from determined_ds.train.recovering import after_out_of_memory

    try:
        shrinks, words = after_out_of_memory(_training, ending.reason)
    except Exception as error:  # such as a master, or a disk, that does not take it
        return ending, f"no start with smaller micro-batches: {error!r}"
    return (ending._replace(code=EXIT_CRASHED) if shrinks else ending), words


def _said_by_chief(error: BaseException) -> bool:
    """Whether rank 0 reports why this rank ends: in a moment its launcher ends the others, unless this one is alone."""
    if os.environ.get("RANK", "0") == "0":
        return False
    if isinstance(error, ChiefFailed):
        return True
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    return STOP.wait(APART_S if log.on_cluster() else APART_S / 5)


# ------------------------------------------------------------------------------------------- the process


def rank_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The options that a launcher hands to each rank, be it of a trial or of a script."""
    parser = argparse.ArgumentParser(prog=f"python3 -m {module}", description=description)
    add = parser.add_argument
    add("--run-dir", type=Path, help="where an off-cluster run writes (det-ds run sets it)")
    add("--accelerator", choices=("cpu", "cuda"), help="default: CUDA if available")
    add("--test", action="store_true", help="one batch, one validation, one checkpoint")
    add("--resume", metavar="CHECKPOINT", help="uuid to resume from; its folder, where it is another run's")
    add("--fork", metavar="DIR", type=Path, help="checkpoint of another run, to start from")
    steps: dict[str, Any] = {"metavar": "STEPS", "type": int}
    add("--measure", **steps, help="measure this many steps, instead of training to the end")
    add("--warmup", **steps, default=5, help="steps before those measured")
    add("--profile", action="store_true", help="record the measured steps by torch's profiler")
    return parser


class RankProcess:
    """This process, which ends by reporting why.

    Args:
        run_dir: Where an off-cluster run writes; None on a cluster.
        script: The name of the script that it runs; "" where it trains a trial.
    """

    def __init__(self, run_dir: Path | None, script: str = "") -> None:
        self._script, self._context_dir = script, Path.cwd().resolve()
        self._run_dir = None if run_dir is None else RunDir(run_dir)
        if run_dir is None:
            return
        if PARENT in os.environ:
            end_with(int(os.environ[PARENT]))
        else:
            die_with_parent()
        stop_on_signal(lambda: not script or (_run is not None and _run.listens))
        outlive_readers()
        show = threading.excepthook
        # TensorBoard's thread meets a full disk too; the one that trains says it.
        threading.excepthook = lambda error: (
            None if error.exc_value and exhausted(error.exc_value, Path.cwd()) else show(error)
        )

    def run(self, work: Callable[[], None]) -> int:
        """Do the work of this rank, and report why it ends where it fails. Returns the exit code.

        In a trial, an exit by the author's code is a failure, whatever its code: by ``os._exit`` too.
        """
        real_exit, process = os._exit, os.getpid()

        def os_exit(status: int) -> NoReturn:
            frames = traceback.extract_stack() if os.getpid() == process else []  # not forked from it
            if any(self._is_authors(frame.filename) for frame in frames):
                message = f"the trial called os._exit({status!r}): {NOT_ENDED}"
                ending = Ending(EXIT_TRAINING_FAILED, ERROR, message)
                status = self._report(message, SystemExit(status), ending)
                sys.stdout.flush()
                sys.stderr.flush()
            real_exit(status)

        os._exit = real_exit if self._script else os_exit
        try:
            try:
                work()
            finally:
                os._exit = real_exit
                # Data-loader workers may end in any way now; torch would report that as another error.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        except KeyboardInterrupt:
            return 130
        except SystemExit as error:
            if (message := self._exit_message(error)) is None:
                raise
            return self._report(message, error, Ending(EXIT_TRAINING_FAILED, ERROR, message))
        except BaseException as error:  # Determined's InvalidExperimentException is not an Exception
            ending = ending_of(error, None if self._run_dir is None else self._run_dir.path)
            message = str(error) if isinstance(error, ConfigError) else f"error: {error}"
            if not isinstance(error, DeterminedDSError):
                message = ending.used_up or self._traceback(error)
            if ending.cause == OUT_OF_MEMORY:
                ending, words = recovered(ending)
                message = f"{message.rstrip()}\n\n{words}" if words else message
            return self._report(message, error, ending)
        leave_watch()
        return 0

    def _exit_message(self, error: SystemExit) -> str | None:
        """The message about an ``exit`` that is a failure; None for any other."""
        if self._script:
            how = f" with exit code {error.code}" if isinstance(error.code, int) else f": {error.code}"
            return f"{self._script} ended{how}"
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if self._is_authors(frame.filename):
                path = (self._context_dir / frame.filename).resolve().relative_to(self._context_dir)
                at = f"{path}:{frame.lineno}, in {frame.name}"
                return f"the trial called exit({error.code!r}) at {at}: {NOT_ENDED}"
        return None

    def _is_authors(self, file: str) -> bool:
        """Whether a file is in the context directory, and of no package that is installed there."""
        path = (self._context_dir / file).resolve()
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        is_code = not file.startswith("<") and path.is_relative_to(self._context_dir)
        return is_code and not installed and not path.is_relative_to(PACKAGE)

    def _traceback(self, error: BaseException) -> str:
        """An error's traceback from the author's first frame on, with all of it in a file of the run."""
        whole = traceback.TracebackException.from_exception(error)
        text, left, any_of_author = "".join(whole.format()), [whole], False
        while left:
            each = left.pop()
            causes = (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ()))
            left += filter(None, causes)
            own = [index for index, frame in enumerate(each.stack) if self._is_authors(frame.filename)]
            any_of_author = any_of_author or bool(own)
            del each.stack[: own[0] if own else len(each.stack)]
        trimmed = "".join(whole.format())
        if not any_of_author or trimmed == text:
            return text
        with contextlib.suppress(OSError):
            if self._run_dir is not None:
                keep = self._run_dir.traceback(int(os.environ.get("RANK", "0")))
                keep.parent.mkdir(parents=True, exist_ok=True)
                keep.write_text(text)
                trimmed += f"\nfull traceback: {keep}\n"
        return trimmed

    def _report(self, message: str, error: BaseException, ending: Ending) -> int:
        """Report why this rank ends: to our launcher, in the task's log on a cluster, or else on stderr."""
        sys.unraisablehook = lambda _: None  # errors of destructors say nothing new
        code = ending.code
        if report_failure(message, code, cause=ending.cause, reason=ending.reason):
            return code
        if not log.on_cluster():
            print(message, file=sys.stderr, flush=True)
            if LAUNCHED_BY in os.environ and not _said_by_chief(error):
                copy_to_terminal(message)
            return code
        if _said_by_chief(error):
            return code
        foreseen = isinstance(error, DeterminedDSError | SystemExit)
        if isinstance(error, DeterminedDSError):
            lines = log.error_lines(error)
        else:
            text = message if foreseen else traceback.format_exception_only(error)[-1]
            lines = log.lines_of(log.ERROR, text)
        if code != EXIT_CRASHED:  # a last line for the log policies
            lines.append(log.OUT_OF_MEMORY if ending.cause == OUT_OF_MEMORY else log.NO_RESTART_HELPS)
        print(*([] if foreseen else [message.rstrip()]), *lines, sep="\n", file=sys.stderr, flush=True)
        return code


def end_process(code: int) -> NoReturn:
    """End this process without waiting for threads of the process group, which may wait for a peer that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def show_own_errors() -> None:
    """From now on an error of this library that ends the script is printed without a traceback."""
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return  # the interpreter stays
    outer = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if not isinstance(error, DeterminedDSError):
            outer(kind, error, traceback)
            return
        rank = int(os.environ.get("RANK", "0"))
        if rank == 0 or not isinstance(error, (ConfigError, ChiefFailed)):  # rank 0 has the same
            lines = [f"rank {rank}: {line}" if rank else line for line in lines_of_error(error)]
            # Not to sys.stderr, which torch collects, to put the rank before each line.
            print(*lines, sep="\n", file=sys.__stderr__, flush=True)
        end_process(error.exit_code)

    sys.excepthook = hook
