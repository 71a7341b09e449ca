"""``det-ds run`` as one rank of somebody else's launcher: torchrun, srun, mpirun, deepspeed.

1. It finds its place (:mod:`~determined_ds.launch.elsewhere.placement`) and
   starts this very command anew, in place, with the
   environment that a rank of ours has: torch is not loaded yet.
2. Rank 0 decides the run, writes the run directory and tells the others where it is, by a store of torch's.
3. The others answer whether they see it. What is wrong anywhere is said by rank 0, and all end with the same code.
4. All of them do what ``python3 -m determined_ds.train`` does. Rank 0 writes ``result.json``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from determined_ds.config.accelerator import Accelerator
from determined_ds.devices import detect_accelerator, detect_without_torch, kind_of_device
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, DeterminedDSError, Problem, lines_of_error
from determined_ds.experiment.decide import read_document
from determined_ds.experiment.secrets import secrets_of
from determined_ds.experiment.variables import variables_for
from determined_ds.launch.asked import Asked
from determined_ds.launch.elsewhere.meeting import Meeting
from determined_ds.launch.elsewhere.placement import HYDRA, OPENMPI, SLURM, TORCHRUN, Placement
from determined_ds.launch.elsewhere.shared_folder import (
    digest_of,
    not_shared,
    remove_tokens,
    unseen,
    write_token,
)
from determined_ds.launch.prepare import LocalRun, prepare_run
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.start import Outcome, environment_of_ranks
from determined_ds.launch.resuming import completed
from determined_ds.protocol.checkpoint_files import checkpoints_in, forget_partial
from determined_ds.protocol.exhausted import allow_open_files
from determined_ds.protocol.handed_on import HANG_TIMEOUT, LAST_ACTS, LAUNCHED_BY, REPORT, TERMINAL
from determined_ds.protocol.laid_aside import ASIDE, forget_aside
from determined_ds.protocol.result import write_result
from determined_ds.protocol.run_dir import CHECKPOINTS, LOGS, short
from determined_ds.protocol.run_lock import RunLock
from determined_ds.protocol.signals import STOP, stop_on_signal

# The others start about when rank 0 does; where they do not come, it has said why it ends.
DISMISS_WITHIN = timedelta(minutes=3)
Train = Callable[[list[str]], int]
BeforeRanks = Callable[[LocalRun], list[str]]


def be_rank(placed: Placement, asked: Asked, *, before_ranks: BeforeRanks, train: Train) -> NoReturn:
    """Be one of the ranks, to its end.

    Args:
        placed: The place of this process.
        asked: What to run.
        before_ranks: Looks at rank 0's machine; returns warnings, and raises what keeps ranks from training there.
        train: ``determined_ds.train.main``.
    """
    if os.environ.get(LAUNCHED_BY) != f"{os.getpid()} {placed.launcher}":
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _environment(placed, asked))
    stop_on_signal()
    allow_open_files()
    if placed.rank:
        code = _follow(placed, asked, train)
    else:
        code = _lead(placed, asked, before_ranks, train)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the process group may wait for a peer that is gone; nothing of ours is left to do.
    os._exit(code)


def _environment(placed: Placement, asked: Asked) -> dict[str, str]:
    """The environment of this rank. What is wrong with the configuration is said once the ranks have met."""
    if placed.launcher == TORCHRUN and not _stated_by_user("OMP_NUM_THREADS"):
        os.environ.pop("OMP_NUM_THREADS", None)
    if threads := _threads_given(placed):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    own = {**placed.variables(), LAUNCHED_BY: f"{os.getpid()} {placed.launcher}"}
    if asked.hang_timeout is not None:
        own[HANG_TIMEOUT] = f"{asked.hang_timeout:g}"
    try:
        accelerator, document, variables = _read(asked)
    except ConfigError:
        return {**os.environ, **own}
    folder = asked.context_dir.resolve()
    environment = environment_of_ranks(placed.local_size, accelerator, folder, variables)
    used = ("checkpoint_storage",) if asked.storage else ()
    return {**environment, **secrets_of(document.data, used=used), **own}


def _read(asked: Asked) -> tuple[Accelerator, Document, Mapping[str, str | None]]:
    """What this machine computes on, the experiment as it lies here, and its environment variables."""
    accelerator = detect_without_torch(asked.accelerator) or detect_accelerator(asked.accelerator)
    document = read_document(asked.config, asked.context_dir, overrides=asked.overrides)
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
    """Threads for which the launcher has given this rank cores of its own; None where ranks share the machine's."""
    if placed.launcher == SLURM:
        given = os.environ.get("SLURM_CPUS_PER_TASK", "")
        return int(given) if given.isdigit() else None
    if placed.launcher not in (OPENMPI, HYDRA) or not hasattr(os, "sched_getaffinity"):
        return None
    cores = len(os.sched_getaffinity(0))
    return cores if cores < len(os.sched_getaffinity(os.getppid())) else None


# ------------------------------------------------------------------------------------------- rank 0


def _lead(placed: Placement, asked: Asked, before_ranks: BeforeRanks, train: Train) -> int:
    """Rank 0: decide, tell the others, train, and write how it ended."""
    try:
        prepared = _decide(placed, asked)
        warnings = [str(found) for found in (*prepared.start.damages, *prepared.warnings)]
        warnings += before_ranks(prepared)
        print(*prepared.header(), sep="\n", flush=True)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
        if prepared.complete and not asked.test and not asked.measured:
            print(f"  complete   this run is complete: {prepared.complete}", flush=True)
            write_result(
                prepared.run_dir, exit_code=0, stopped=False, trial_seed=prepared.experiment.trial_seed
            )
            return _dismiss(placed, 0)
        with RunLock(prepared.run_dir):
            return _lead_through(placed, asked, prepared, train)
    except ConfigError as error:
        print(*lines_of_error(error), sep="\n", file=sys.stderr, flush=True)
        return _dismiss(placed, error.exit_code)
    except DeterminedDSError as error:  # the others cannot be met
        print(*lines_of_error(error), sep="\n", file=sys.stderr, flush=True)
        return error.exit_code


def _decide(placed: Placement, asked: Asked) -> LocalRun:
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # torchrun's --max-restarts
    if again and asked.run_dir is None:
        message = "torchrun starts the ranks again, and nothing says which run they are to go on with"
        raise ConfigError(Problem(key="--run-dir", message=message, fix="add --run-dir DIR", code="run-dir"))
    return prepare_run(
        asked.config,
        asked.context_dir,
        slots=asked.slots,
        overrides=asked.overrides,
        run_dir=asked.run_dir,
        resume=asked.resume or again,
        accelerator=asked.accelerator,
        now=datetime.now(),
        measured=asked.measured,
        storage=asked.storage,
        placed=placed,
    )


def _dismiss(placed: Placement, code: int) -> int:
    """Tell the others that nothing will run. Returns the code that all end with."""
    try:
        meeting = Meeting(placed, patience=DISMISS_WITHIN)
        meeting.told({"exit": code})
        meeting.judged(code)
    except (DeterminedDSError, RuntimeError):  # they have not come, and the launcher ends them
        pass
    return code


def _lead_through(placed: Placement, asked: Asked, prepared: LocalRun, train: Train) -> int:
    run_dir = prepared.run_dir
    prepared.write()
    (run_dir / LOGS).mkdir(exist_ok=True)
    plan: dict[str, Any] = {
        "run_dir": str(run_dir),
        "token": write_token(run_dir),
        "digest": digest_of(run_dir),
        "arguments": [  # of determined_ds.train
            *(prepared.experiment.trial, "--run-dir", str(run_dir)),
            *("--accelerator", prepared.resolved.accelerator.name),
            *prepared.arguments(test=asked.test, more=asked.more),
            *prepared.start_options,
        ],
    }
    try:
        meeting = Meeting(placed)
        meeting.told(plan)
        problems = _problems(meeting.agreed(_answer(placed, "")), short(run_dir))
        if problems:
            print(*lines_of_error(ConfigError(problems)), sep="\n", file=sys.stderr, flush=True)
        meeting.judged(ConfigError.exit_code if problems else None)
        os.chdir(asked.context_dir)
        if os.environ.get("DET_MASTER") and not (asked.test or asked.measured):
            os.environ[REPORT] = "1"
        LAST_ACTS.append(partial(_end, prepared))
        code = ConfigError.exit_code if problems else train(plan["arguments"])
        _end(prepared, code)
        return code
    finally:
        remove_tokens(run_dir)
        forget_aside(run_dir)


def _answer(placed: Placement, unshared: str, problem: str = "") -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "machine": placed.machine,
        "unshared": unshared,
        "problem": problem,
    }


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
    found += [Problem(key="", message=told) for told in elsewhere]
    return found


def _end(prepared: LocalRun, code: int) -> None:
    """Write how it ended, and say how to go on."""
    run_dir = prepared.run_dir
    stopped = not code and STOP.is_set() and not _has_all(prepared)
    outcome = Outcome(
        failures=(Failure(rank=0, code=code, exit_code=code, time=time.time()),) if code else (),
        signals=(signal.SIGTERM,) if stopped else (),
    )
    if code:
        forget_partial(run_dir / CHECKPOINTS)
    if not (run_dir / ASIDE).exists():  # else the ranks have left the run as it was
        write_result(
            run_dir,
            exit_code=outcome.exit_code,
            stopped=outcome.stopped,
            trial_seed=prepared.experiment.trial_seed,
        )
    if stopped:
        print(f"resume with: the same command with --run-dir {short(run_dir)} --resume", file=sys.stderr)


def _has_all(prepared: LocalRun) -> bool:
    there = checkpoints_in(prepared.run_dir / CHECKPOINTS)
    return bool(there and completed(there[0], prepared.resolved))


# ------------------------------------------------------------------------------------------- the others


def _follow(placed: Placement, asked: Asked, train: Train) -> int:
    """Any other rank: see what rank 0 has decided, and train."""
    try:
        meeting = Meeting(placed)
        plan = meeting.told()
        if "exit" not in plan:
            meeting.agreed(_look(placed, asked, plan))
        code = meeting.judged()
    except (DeterminedDSError, RuntimeError) as error:  # torch's, of a store whose rank 0 has ended
        print(f"error: rank {placed.rank}: rank 0 cannot be reached: {error}", file=sys.stderr, flush=True)
        return DeterminedDSError.exit_code
    if code is not None:
        return int(code)
    _write_to(Path(plan["run_dir"]) / LOGS / f"rank{placed.rank}.log")
    os.chdir(asked.context_dir)
    return train(plan["arguments"])


def _look(placed: Placement, asked: Asked, plan: dict[str, Any]) -> dict[str, Any]:
    """What this rank sees of the run."""
    problem, unshared = "", ""
    try:
        _read(asked)
    except ConfigError as error:
        problem = str(error)
    if placed.machine and not placed.local_rank:
        unshared = unseen(Path(plan["run_dir"]), plan["token"], plan["digest"])
    return _answer(placed, unshared, problem)


def _write_to(log: Path) -> None:
    """What this rank writes goes to its log, as under our own launcher; why it ends is said here as well."""
    os.environ[TERMINAL] = str(os.dup(2))
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
