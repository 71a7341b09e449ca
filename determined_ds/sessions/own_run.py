"""A script that no launcher of ours has started: ``python3 train.py``, ``torchrun train.py``. It makes its own run."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from determined import core

from determined_ds.checkpoints.files import remove_partial
from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import Where
from determined_ds.devices import detect_accelerator
from determined_ds.documents.document import Document
from determined_ds.documents.files import read_yaml
from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import OF_EXPERIMENTS, decide_stated
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.experiment.secrets import restored
from determined_ds.launch.options import RunOptions
from determined_ds.launch.outcome import Failure, Outcome
from determined_ds.launch.resume import keeping_seed, start_in
from determined_ds.launch.run import LocalRun, as_constants
from determined_ds.rundir.handed_on import LAST, shortened
from determined_ds.rundir.run_dir import RUNS, RunDir, new_run_dir, short, slug
from determined_ds.rundir.run_lock import RunLock
from determined_ds.rundir.signals import STOP
from determined_ds.sessions.session import in_words
from determined_ds.train.ending import cause_of, exit_code_of, reason_of
from determined_ds.train.group.process_group import as_chief, join_process_group
from determined_ds.train.opening import open_context
from determined_ds.train.warning_keeper import KEEPER

# In the environment: the run directory to resume from, as ``session(config, run_dir=DIR, resume=True)`` says it.
RESUME = "DETERMINED_DS_RESUME"
SLOTS = ("resources", "slots_per_trial")
# What a problem of a run directory says of options of det-ds run -> of arguments of session.
WORDS = {
    "add --resume to continue it": "write session(..., resume=True) to continue it",
    "add --run-dir ": "write run_dir=",
    "--run-dir": "run_dir",
    "--resume": "resume",
}


@contextlib.contextmanager
def own_run(
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
    run_dir: Path | None,
    *,
    resume: bool,
    accelerator: str | None,
    stopped: Callable[[], bool],
) -> Iterator[tuple[Any, Path, str | None, Path | None]]:
    """Open a run for a script; a collective. Its arguments are those of ``session``.

    Args:
        stopped: Returns whether training has stopped as requested, once it has ended.

    Yields:
        The context, the run directory, the uuid of the checkpoint to resume, and the folder of one to fork.

    Raises:
        ConfigError: it cannot run; every reason.
    """
    devices = detect_accelerator(accelerator)
    distributed = join_process_group(devices)
    with contextlib.ExitStack() as stack:
        run = as_chief(distributed, lambda: _decided(config, run_dir, resume, distributed, devices))
        if distributed.rank == 0:
            stack.enter_context(_recorded(run, stopped))
            print(*run.header(), sep="\n", flush=True)
            for warning in (*run.start.damages, *run.warnings):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        distributed.allgather(None)  # what ranks read is written
        KEEPER.begin(RunDir(run.run_dir).logs, distributed.rank)
        stack.callback(KEEPER.end)
        stack.enter_context(_stopping())
        opened = open_context(
            experiment=run.experiment,
            run_dir=run.run_dir,
            accelerator=devices.name,
            distributed=distributed,
        )
        checkpoint, fork = run.start.checkpoint, run.start.fork
        latest = checkpoint.uuid if checkpoint else None
        yield stack.enter_context(opened), run.run_dir, latest, fork.path if fork else None


def _decided(
    config: Any, stated: Path | None, resume: bool, distributed: core.DistributedContext, devices: Accelerator
) -> LocalRun:
    """What runs, and where; as under every launcher, the first launch of a job may say that it resumes."""
    experiment = parse_experiment(document_of(config, distributed.size))
    where = Where(
        context_dir=Path.cwd(),
        accelerator=devices,
        slots=distributed.size,
        slots_origin="the launched ranks",
        machines=distributed.cross_size,
    )
    resolved = decide_stated(experiment, experiment.hyperparameters, where)
    resumed = os.environ.get(RESUME)
    stated = Path(resumed) if resumed else stated
    resume = resume or resumed is not None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if stated is not None and resumed is None and RunDir(stated).is_empty():
        resume = False
    run_dir = stated or new_run_dir(RUNS / slug(experiment.name), datetime.now())
    try:
        start = start_in(
            run_dir,
            experiment,
            resolved,
            resume=LAST if resume else None,
            stated=stated is not None,
            forks=True,
        )
    except ConfigError as error:
        raise ConfigError([in_words(problem, WORDS) for problem in error.problems]) from None
    if start.checkpoint is not None:
        experiment = keeping_seed(start.checkpoint, experiment)
    return OwnLocalRun(
        options=RunOptions(config=Path(experiment.document.name)),
        experiment=experiment,
        resolved=resolved,
        accelerator=devices,
        context_dir=Path.cwd(),
        run_dir=run_dir.resolve(),
        start=start,
        warnings=resolved.warnings if resolved is not None else (),
    )


def document_of(config: str | os.PathLike[str] | Mapping[str, Any] | None, ranks: int) -> Document:
    """The experiment that a script is given, on the ranks that were launched.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    if isinstance(config, (str, os.PathLike)):
        document = restored(read_yaml(Path(config)), os.environ)
        if not OF_EXPERIMENTS & document.data.keys():
            message = "is not an experiment: it has no hyperparameters"
            fix = "give an experiment's YAML, or the hyperparameters as a mapping: session({...})"
            raise ConfigError(
                Problem(key="session", value=str(config), message=message, fix=fix, code="session")
            )
    elif config is None or isinstance(config, Mapping):
        given = as_plain(dict(config or {}))
        if not OF_EXPERIMENTS & given.keys():
            given = {"hyperparameters": as_constants(given)}
        document = Document(name="session", data=given)
    else:
        message = "expected the path of an experiment's YAML, a mapping, or nothing"
        fix = 'write session("experiment.yaml"), or session({"global_batch_size": 32, ...})'
        kind = type(config).__name__
        raise ConfigError(Problem(key="session", value=kind, message=message, fix=fix, code="session"))
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c") else "script.py")
    for key, value in (("name", script.stem), ("entrypoint", ["python3", short(script)])):
        if document.get((key,)) is None:
            document = document.overwritten(((key,), value, "the script"))
    return document.overwritten((SLOTS, ranks, "the launched ranks"))


class OwnLocalRun(LocalRun):
    """A run that a script makes."""

    @property
    def resume_command(self) -> str:
        """The command that resumes it: the same, with the run directory in the environment."""
        return f"{RESUME}={shlex.quote(short(self.run_dir))} {shlex.join([*sys.orig_argv])}"


@contextlib.contextmanager
def _recorded(run: LocalRun, stopped: Callable[[], bool]) -> Iterator[None]:
    """Write what ranks read, and how the run has ended; on rank 0."""
    with RunLock(run.run_dir):
        run.write()
        outcome = Outcome()
        try:
            yield
        except BaseException as error:
            if not (isinstance(error, SystemExit) and not error.code):
                outcome = _failed(error, run)
            raise
        finally:
            if stopped() and not outcome.failures:
                outcome = Outcome(signals=(signal.SIGTERM,))
            RunDir(run.run_dir).remove_next()
            run.conclude(outcome)
            closing = run.closing()
            if stopped() and not closing:
                print(f"resume with: {run.resume_command}", file=sys.stderr, flush=True)
            print(*closing, sep="\n", end="\n" if closing else "", flush=True)


def _failed(error: BaseException, run: LocalRun) -> Outcome:
    remove_partial(RunDir(run.run_dir).checkpoints)
    code = exit_code_of(error)
    reason = shortened(reason_of(error))
    failure = Failure(
        rank=0, code=code, exit_code=code, time=time.time(), cause=cause_of(error), reason=reason
    )
    return Outcome(failures=(failure,))


@contextlib.contextmanager
def _stopping() -> Iterator[None]:
    """Within, SIGTERM and SIGINT request a stop; the second one does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def stop(number: int, _frame: Any) -> None:
        STOP.set()
        signal.signal(number, before[signal.Signals(number)])
        if os.environ.get("RANK", "0") == "0":
            print("stopping after this batch; a second signal stops at once", file=sys.stderr, flush=True)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        STOP.clear()
