"""``det-ds run`` as one rank of another launcher: torchrun, srun, mpirun, deepspeed.

1. It finds its place (:mod:`~determined_ds.launch.external.placement`) and executes this command again, in place, with
   the environment of a rank of ours: torch is not loaded yet.
2. Rank 0 decides the run, writes the run directory and sends its path to the others, through a store of torch's.
3. The others answer whether they see it. Rank 0 reports what is wrong anywhere, and all end with the same code.
4. All do what ``python3 -m determined_ds.train`` or ``determined_ds.script`` does. Rank 0 writes ``result.json``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from determined_ds.config.layout import Accelerator
from determined_ds.devices import detect_accelerator, detect_without_torch, kind_of_device
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, DeterminedDSError, Problem, lines_of_error
from determined_ds.experiment.decide import read_document
from determined_ds.experiment.secrets import secrets_of
from determined_ds.experiment.variables import variables_for
from determined_ds.launch.external.agreement import Agreement
from determined_ds.launch.external.placement import HYDRA, OPENMPI, SLURM, TORCHRUN, Placement
from determined_ds.launch.external.shared_folder import (
    digest_of,
    not_shared,
    remove_tokens,
    unseen,
    write_token,
)
from determined_ds.launch.last_words import closing_lines, show_closing
from determined_ds.launch.local_run import LocalRun
from determined_ds.launch.options import RunOptions
from determined_ds.launch.prepare import prepare_run
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import Outcome, environment_of_ranks
from determined_ds.launch.resuming import completed
from determined_ds.rundir.checkpoint_files import checkpoints_in, remove_partial
from determined_ds.rundir.conclusion import CRASH
from determined_ds.rundir.exhausted import allow_open_files
from determined_ds.rundir.handed_on import (
    HANG_TIMEOUT,
    LAST,
    LAST_ACTS,
    LAUNCHED_BY,
    REPORT,
    REPORTED,
    TERMINAL,
)
from determined_ds.rundir.run_dir import RunDir, short
from determined_ds.rundir.run_lock import RunLock
from determined_ds.rundir.signals import STOP, stop_on_signal

# The others start about when rank 0 does; where they do not come, rank 0 has reported why it ends.
DISMISS_WITHIN = timedelta(minutes=3)
# How often a launcher has given the same command before: torchrun's --max-restarts, a job that is requeued.
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
Train = Callable[[list[str]], int]
BeforeRanks = Callable[[LocalRun], list[str]]


def be_rank(placed: Placement, options: RunOptions, *, before_ranks: BeforeRanks, train: Train) -> NoReturn:
    """Be one of the ranks, to its end.

    Args:
        placed: The place of this process.
        options: What to run.
        before_ranks: Checks rank 0's machine; returns warnings, and raises what keeps ranks from training there.
        train: Does what a rank does, given the words after ``python3 -m``.
    """
    if os.environ.get(LAUNCHED_BY) != f"{os.getpid()} {placed.launcher}":
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _environment(placed, options))
    stop_on_signal()
    allow_open_files()
    code = _follow(placed, options, train) if placed.rank else _lead(placed, options, before_ranks, train)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the process group may wait for a peer that is gone.
    os._exit(code)


def _environment(placed: Placement, options: RunOptions) -> dict[str, str]:
    """The environment of this rank. Problems of the configuration are reported once the ranks have met."""
    take_threads(placed)
    own = {**placed.variables(), LAUNCHED_BY: f"{os.getpid()} {placed.launcher}"}
    if options.hang_timeout is not None:
        own[HANG_TIMEOUT] = f"{options.hang_timeout:g}"
    try:
        accelerator, document, variables = _read(options)
    except ConfigError:
        return {**os.environ, **own}
    folder = options.context_dir.resolve()
    environment = environment_of_ranks(placed.local_size, accelerator, folder, variables)
    return {**environment, **secrets_of(document.data), **own}


def take_threads(placed: Placement) -> None:
    """Set this process's ``OMP_NUM_THREADS`` to the cores that the launcher has bound it to, unless the user has."""
    if placed.launcher == TORCHRUN and not _stated_by_user("OMP_NUM_THREADS"):
        os.environ.pop("OMP_NUM_THREADS", None)
    if threads := _threads_given(placed):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _read(options: RunOptions) -> tuple[Accelerator, Document, Mapping[str, str | None]]:
    """This machine's accelerator, the experiment as it is here, and its environment variables."""
    accelerator = detect_without_torch(options.accelerator) or detect_accelerator(options.accelerator)
    document = read_document(options.config, options.context_dir, overrides=options.overrides)
    return accelerator, document, variables_for(document, kind_of_device(accelerator)).values


def _stated_by_user(name: str) -> bool:
    """Whether torchrun was started with a variable, and has not set it itself, as it does ``OMP_NUM_THREADS`` to 1.

    Source: ``config_from_args`` in torch 2.13's ``torch/distributed/run.py``.
    """
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return True
    return any(entry.startswith(f"{name}=".encode()) for entry in started_with.split(b"\0"))


def _threads_given(placed: Placement) -> int | None:
    """The number of cores that the launcher has bound this rank to; None where ranks share the machine's."""
    if placed.launcher == SLURM:
        given = os.environ.get("SLURM_CPUS_PER_TASK", "")
        return int(given) if given.isdigit() else None
    if placed.launcher not in (OPENMPI, HYDRA) or not hasattr(os, "sched_getaffinity"):
        return None
    cores = len(os.sched_getaffinity(0))
    return cores if cores < len(os.sched_getaffinity(os.getppid())) else None


# ------------------------------------------------------------------------------------------- rank 0


def _lead(placed: Placement, options: RunOptions, before_ranks: BeforeRanks, train: Train) -> int:
    """Rank 0: decide, inform the others, train, and write how it ended."""
    try:
        prepared = _decide(placed, options)
        warnings = [*prepared.start.damages, *prepared.warnings, *before_ranks(prepared)]
        print(*prepared.header(), sep="\n", flush=True)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        if prepared.complete:
            prepared.show_complete()
            return _dismiss(placed, 0)
        with RunLock(prepared.run_dir):
            return _lead_through(placed, prepared, train)
    except ConfigError as error:
        print(*lines_of_error(error), sep="\n", file=sys.stderr, flush=True)
        return _dismiss(placed, error.exit_code)
    except DeterminedDSError as error:  # the others cannot be reached
        print(*lines_of_error(error), sep="\n", file=sys.stderr, flush=True)
        return error.exit_code


def _decide(placed: Placement, options: RunOptions) -> LocalRun:
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # torchrun's --max-restarts
    if again and options.run_dir is None:
        message = "torchrun restarts the ranks, and does not know which run to resume"
        raise ConfigError(Problem(key="--run-dir", message=message, fix="add --run-dir DIR", code="run-dir"))
    resume = options.resume
    if again and (resume is None or checkpoints_in(RunDir(options.run_dir or Path()).checkpoints)):
        resume = LAST
    # Once the optimizer was reset, its new state is in the checkpoints.
    resets = options.reset_optimizer and all(os.environ.get(name, "0") == "0" for name in RESTARTS)
    prepared = prepare_run(replace(options, resume=resume, reset_optimizer=resets), placed=placed)
    if prepared.start.superseded and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        message = "torchrun's --max-restarts would not know whether the checkpoint has been resumed from"
        fix = (
            f"leave --max-restarts out, or continue in a new run: --resume {short(options.run_dir or Path())}"
        )
        raise ConfigError(Problem(key="--resume", value=resume, message=message, fix=fix, code="run-dir"))
    return prepared


def _dismiss(placed: Placement, code: int) -> int:
    """Inform the others that nothing will run. Returns the code that all end with."""
    try:
        agreement = Agreement(placed, patience=DISMISS_WITHIN)
        agreement.plan({"exit": code})
        agreement.verdict(code)
    except (DeterminedDSError, RuntimeError):  # they have not come, and the launcher ends them
        pass
    return code


def _lead_through(placed: Placement, prepared: LocalRun, train: Train) -> int:
    run_dir, options = prepared.run_dir, prepared.options
    prepared.write()
    RunDir(run_dir).logs.mkdir(exist_ok=True)
    arguments = prepared.rank_words
    token, digest = write_token(run_dir), digest_of(run_dir)
    try:
        agreement = Agreement(placed)
        agreement.plan({"run_dir": str(run_dir), "token": token, "digest": digest, "arguments": arguments})
        problems = _problems(agreement.answers(_answer(placed, "")), short(run_dir))
        if problems:
            print(*lines_of_error(ConfigError(problems)), sep="\n", file=sys.stderr, flush=True)
        agreement.verdict(ConfigError.exit_code if problems else None)
        os.chdir(options.context_dir)
        if os.environ.get("DET_MASTER") and not (options.test or options.is_measured):
            os.environ[REPORT] = "1"
        LAST_ACTS.append(partial(_end, prepared))
        code = ConfigError.exit_code if problems else train(arguments)
        _end(prepared, code)
        return code
    finally:
        remove_tokens(run_dir)
        RunDir(run_dir).remove_next()


def _answer(placed: Placement, unshared: str, problem: str = "") -> dict[str, Any]:
    host = socket.gethostname()
    return {"host": host, "machine": placed.machine, "unshared": unshared, "problem": problem}


def _problems(answers: list[dict[str, Any]], run_dir: str) -> list[Problem]:
    """What is wrong on other machines than the first, each once."""
    found = []
    hosts: dict[int, set[str]] = {}
    for answer in answers:
        hosts.setdefault(answer["machine"], set()).add(answer["host"])
    for machine, names in hosts.items():
        if len(names) > 1:
            message = f"ranks of machine {machine} are on {', '.join(sorted(names))}"
            fix = "have the launcher number the ranks of a machine one after the other, as many on each"
            found.append(Problem(key="the environment", message=message, fix=fix, code="launcher"))
    unshared = [f"{answer['host']} {answer['unshared']}" for answer in answers if answer["unshared"]]
    if unshared:
        found.append(not_shared(run_dir, unshared))
    elsewhere = {f"{answer['host']}: {answer['problem']}": None for answer in answers if answer["problem"]}
    return [*found, *(Problem(key="", message=message) for message in elsewhere)]


def _end(prepared: LocalRun, code: int) -> None:
    """Write how it ended, and print how to resume."""
    checkpoints = RunDir(prepared.run_dir).checkpoints
    kept = checkpoints_in(checkpoints)
    is_complete = kept and prepared.resolved is not None and completed(kept[0], prepared.resolved)
    stopped = not code and STOP.is_set() and not is_complete
    cause, reason = str(REPORTED.get("cause", CRASH)), str(REPORTED.get("reason", ""))
    failure = Failure(rank=0, code=code, exit_code=code, time=time.time(), cause=cause, reason=reason)
    if code:
        remove_partial(checkpoints)
    prepared.conclude(
        Outcome(failures=(failure,) if code else (), signals=(signal.SIGTERM,) if stopped else ())
    )
    if stopped:
        there = short(prepared.run_dir)
        print(f"resume with: the same command with --run-dir {there} --resume", file=sys.stderr, flush=True)
    show_closing(closing_lines(prepared.options, prepared.run_dir))


# ------------------------------------------------------------------------------------------- the others


def _follow(placed: Placement, options: RunOptions, train: Train) -> int:
    """Any other rank: receive what rank 0 has decided, and train."""
    try:
        agreement = Agreement(placed)
        plan = agreement.plan()
        if "exit" not in plan:
            agreement.answers(_look(placed, options, plan))
        code = agreement.verdict()
    except (DeterminedDSError, RuntimeError) as error:  # torch's, of a store whose rank 0 has ended
        print(f"error: rank {placed.rank}: rank 0 cannot be reached: {error}", file=sys.stderr, flush=True)
        return DeterminedDSError.exit_code
    if code is not None:
        return int(code)
    _write_to(RunDir(Path(plan["run_dir"])).log(placed.rank))
    os.chdir(options.context_dir)
    return train(plan["arguments"])


def _look(placed: Placement, options: RunOptions, plan: dict[str, Any]) -> dict[str, Any]:
    """What this rank sees of the run."""
    problem, unshared = "", ""
    try:
        _read(options)
    except ConfigError as error:
        problem = str(error)
    if placed.machine and not placed.local_rank:
        unshared = unseen(Path(plan["run_dir"]), plan["token"], plan["digest"])
    return _answer(placed, unshared, problem)


def _write_to(log: Path) -> None:
    """Send this rank's output to its log, as under our own launcher; why it ends is shown here as well."""
    os.environ[TERMINAL] = str(os.dup(2))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
