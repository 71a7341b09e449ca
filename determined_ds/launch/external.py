"""``det-ds run`` as one rank of another launcher: torchrun, srun, mpirun, deepspeed.

1. It finds its place (:mod:`~determined_ds.launch.placement`) and executes this command again, in place, with the
   environment of a rank of ours: torch is not loaded yet.
2. The ranks meet (:class:`Meeting`). Rank 0 decides the run and writes the run directory.
3. The others answer whether they see it. Rank 0 reports what is wrong anywhere, and all end with the same code.
4. All do what ``python3 -m determined_ds.train`` or ``determined_ds.script`` does. Rank 0 writes ``result.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.devices import detect_accelerator, detect_without_torch, kind_of_device
from determined_ds.documents.document import dotted
from determined_ds.errors import ConfigError, DeterminedDSError, Problem, TrainingError, lines_of_error
from determined_ds.experiment.decide import read_document
from determined_ds.experiment.experiment import SLOTS, variables_for
from determined_ds.experiment.secrets import secrets_of
from determined_ds.launch.options import RunOptions
from determined_ds.launch.placement import SLURM, TORCHRUN, Placement
from determined_ds.launch.prepare import prepare_run
from determined_ds.launch.ranks import environment_of_ranks
from determined_ds.launch.run import LocalRun
from determined_ds.rundir.handed_on import (
    LAST,
    LAST_ACTS,
    LAUNCHED_BY,
    REPORT,
    REPORTED,
    TERMINAL,
    in_words,
    stated_s,
)
from determined_ds.rundir.limits import allow_open_files
from determined_ds.rundir.records import CRASH, read_result
from determined_ds.rundir.run_dir import RunDir, RunLock, run_dir_problem, short
from determined_ds.rundir.signals import STOP, die_with_parent, stop_on_signal, survived_by_parent

SEEN_WITHIN_S = 75.0  # NFS caches attributes up to 60 s (acregmax, acdirmax)
# Minutes that ranks may start later than others: images are loaded, torch is read from a busy disk.
JOIN_TIMEOUT, JOIN_TIMEOUT_MINUTES = "DETERMINED_DS_JOIN_TIMEOUT", 10.0
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
# Once all are there, rank 0 may read a large checkpoint.
PATIENCE = timedelta(hours=2)
POLL_S = 0.1
LATER = f"where ranks take longer to start: export {JOIN_TIMEOUT}=MINUTES"
Train = Callable[[list[str]], int]


def be_rank(placed: Placement, options: RunOptions, *, train: Train) -> NoReturn:
    """Be one of the ranks, to its end; ``train`` does what a rank does, given the words after ``python3 -m``."""
    if os.environ.get(LAUNCHED_BY) != f"{os.getpid()} {placed.launcher}":
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _environment(placed, options))
    die_with_parent()  # a launcher that is killed leaves no rank behind
    survived_by_parent()
    stop_on_signal()
    allow_open_files()
    try:
        meeting = Meeting(placed)
        if placed.rank == 0:
            code = _lead(placed, meeting, options, train)
        else:
            code = _follow(placed, meeting, options, train)
    except DeterminedDSError as error:
        print(*lines_of_error(error), sep="\n", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the process group may wait for a peer that is gone


def _environment(placed: Placement, options: RunOptions) -> dict[str, str]:
    """The environment of this rank. Problems of the configuration are reported once the ranks have met."""
    take_threads(placed)
    own = {**placed.variables(), LAUNCHED_BY: f"{os.getpid()} {placed.launcher}"}
    try:
        accelerator = detect_without_torch(options.accelerator) or detect_accelerator(options.accelerator)
        document = read_document(options.config, options.context_dir, overrides=options.overrides)
        variables = variables_for(document, kind_of_device(accelerator))
    except ConfigError:
        return {**os.environ, **own}
    folder = options.context_dir.resolve()
    environment = environment_of_ranks(placed.local_size, accelerator, folder, variables)
    return {**environment, **secrets_of(document.data), **own}


def take_threads(placed: Placement) -> None:
    """Set this process's ``OMP_NUM_THREADS`` to the cores that SLURM grants it, unless the user has.

    torchrun sets it to 1 itself where its own environment has none (``config_from_args`` in torch 2.13's
    ``torch/distributed/run.py``); ranks that share a machine's cores are left to :func:`environment_of_ranks`.
    """
    name = "OMP_NUM_THREADS"
    if placed.launcher == TORCHRUN:
        with contextlib.suppress(OSError):
            started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes()
            if f"\0{name}=".encode() not in b"\0" + started_with:
                os.environ.pop(name, None)
    elif placed.launcher == SLURM and (cores := os.environ.get("SLURM_CPUS_PER_TASK")):
        os.environ.setdefault(name, cores)


# ------------------------------------------------------------------------------------------- rank 0


def _lead(placed: Placement, meeting: Meeting, options: RunOptions, train: Train) -> int:
    """Rank 0: decide, inform the others, train, and write how it ended."""
    try:
        prepared = _decide(placed, options, again=meeting.again)
        prepared.show()
        with RunLock(prepared.run_dir):
            return _lead_through(meeting, prepared, train)
    except ConfigError as error:
        print(*lines_of_error(error), sep="\n", file=sys.stderr, flush=True)
        meeting.share("plan", {"exit": error.exit_code})
        meeting.leave()
        return error.exit_code


def _decide(placed: Placement, options: RunOptions, *, again: bool) -> LocalRun:
    """Decide the run; where the launcher has restarted the ranks, to resume what they have trained."""
    run_dir = options.run_dir
    if again and run_dir is None:
        message = f"{placed.launcher} restarts the ranks, and does not know which run to resume"
        raise ConfigError(Problem(key="--run-dir", message=message, fix="add --run-dir DIR"))
    if again and (options.resume is None or checkpoints_in(RunDir(run_dir or Path()).checkpoints)):
        options = replace(options, resume=LAST)
    prepared = _of_ranks_that_share(options, placed)
    if again:
        result = read_result(RunDir(prepared.run_dir))
        why = (result.reason if result is not None else None) or "a rank or a machine was lost"
        prepared = replace(
            prepared, restarted=f"{placed.launcher} started the ranks again; it crashed: {why}"
        )
    if prepared.start.superseded and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        message = "torchrun's --max-restarts would not know whether the checkpoint has been resumed from"
        fix = "leave --max-restarts out, or continue from the path of the checkpoint in a new --run-dir"
        raise ConfigError(Problem(key="--resume", value=options.resume, message=message, fix=fix))
    return prepared


def _of_ranks_that_share(options: RunOptions, placed: Placement) -> LocalRun:
    """A run on all ranks; where one that goes on has a batch that they cannot share, on the most that can."""
    try:
        return prepare_run(options, placed=placed)
    except ConfigError:
        for fewer in placed.fewer() if options.resume is not None else ():
            with contextlib.suppress(ConfigError):
                prepared = prepare_run(options, placed=fewer)
                idle = ", ".join(map(str, range(fewer.size, placed.size)))
                message = f"{placed.launcher} started {placed.size} ranks, which cannot share a batch: idle are {idle}"
                fix = "none is needed; with a global_batch_size that they can share, all would train"
                warning = Problem(
                    key=dotted(SLOTS), value=placed.size, message=message, fix=fix, code="idle-ranks"
                )
                return replace(prepared, warnings=(*prepared.warnings, warning))
        raise


def _lead_through(meeting: Meeting, prepared: LocalRun, train: Train) -> int:
    there, options, words = RunDir(prepared.run_dir), prepared.options, prepared.rank_words
    assert prepared.placed is not None
    size = prepared.placed.size
    prepared.write()
    there.logs.mkdir(exist_ok=True)
    try:
        meeting.share(
            "plan", {"run_dir": str(there.path), "digest": _digest(there), "words": words, "size": size}
        )
        unseen = dict.fromkeys(filter(None, meeting.answers("")))
        meeting.share("verdict", ConfigError.exit_code if unseen else None)
        meeting.leave()
        if unseen:
            message = f"must be shared by all machines: {'; '.join(unseen)}"
            fix = "give a --run-dir on a file system that every machine mounts at the same path (NFS, Lustre)"
            problem = run_dir_problem(there.path, message, fix, "run-dir-not-shared")
            print(*lines_of_error(ConfigError(problem)), sep="\n", file=sys.stderr, flush=True)
        os.chdir(options.context_dir)
        if os.environ.get("DET_MASTER") and not (options.test or options.is_measured):
            os.environ[REPORT] = "1"
        LAST_ACTS.extend((partial(_end, prepared), meeting.end))
        os.environ.update(prepared.placed.variables())
        ended = ConfigError.exit_code if unseen else train(words)
        _end(prepared, ended)
        meeting.end(ended)
        return ended
    finally:
        there.remove_next()


def _end(prepared: LocalRun, code: int) -> None:
    """Write how it ended, and print how to resume."""
    stopped = not code and STOP.is_set()
    cause, reason = str(REPORTED.get("cause", CRASH)), str(REPORTED.get("reason", ""))
    if stopped:
        there = short(prepared.run_dir)
        print(f"resume with: the same command with --run-dir {there} --resume", file=sys.stderr, flush=True)
    prepared.end(code, cause, reason, stopped=stopped)


# ------------------------------------------------------------------------------------------- the others


def _follow(placed: Placement, meeting: Meeting, options: RunOptions, train: Train) -> int:
    """Any other rank: receive what rank 0 has decided, look whether it sees the run directory, and train."""
    try:
        plan = meeting.share("plan")
        if "exit" not in plan:
            there, unseen = RunDir(Path(plan["run_dir"])), ""
            until_s = time.monotonic() + SEEN_WITHIN_S
            while _digest(there) != plan["digest"] and not unseen:
                if time.monotonic() > until_s:
                    unseen = f"{socket.gethostname()} does not see what rank 0 wrote to {there.path}"
                time.sleep(0.2)
            meeting.answers(unseen)
            plan["exit"] = meeting.share("verdict")
        meeting.leave()
    except RuntimeError:  # torch's, of a store whose rank 0 has ended
        print(f"error: rank {placed.rank}: rank 0 has ended; see its output", file=sys.stderr)
        return DeterminedDSError.exit_code
    if plan["exit"] is not None:
        return int(plan["exit"])
    if placed.rank >= plan["size"]:
        print(
            f"rank {placed.rank} is idle: {plan['size']} of {placed.size} ranks train",
            file=sys.stderr,
            flush=True,
        )
        return meeting.wait_for_end()
    if plan["size"] < placed.size:
        os.environ.update(next(each for each in placed.fewer() if each.size == plan["size"]).variables())
    # Its output goes to its log, as under our own launcher; why it ends is shown here as well.
    os.environ[TERMINAL] = str(os.dup(2))
    log = RunDir(Path(plan["run_dir"])).log(placed.rank)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.chdir(options.context_dir)
    return train(plan["words"])


def _digest(there: RunDir) -> str:
    """A checksum of what rank 0 has written for this launch: its line in ``launches.jsonl`` has the time."""
    digest = hashlib.sha256()
    for file in (there.experiment, there.launches):
        with contextlib.suppress(OSError):
            digest.update(there.current(file).read_bytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------- how they meet


class Meeting:
    """The ranks of one attempt, once all have come: rank 0 decides, the others answer.

    They exchange JSON values through a store of torch's at ``MASTER_ADDR:MASTER_PORT``, where its process group meets
    afterwards; a single rank needs none. torchrun's store outlives the ranks, and so do the keys of an attempt that
    failed; its ``TORCHELASTIC_RESTART_COUNT`` grows only on the machine whose rank failed. So rank 0 counts the
    attempts in the store and hands the number to the ranks that it finds there, under a token that only a process
    that lives knows. Source: ``_invoke_run`` in torch 2.13's ``elastic/agent/server/api.py``.

    Attributes:
        again: Whether the launcher has given the same command before, on any machine, as rank 0 knows.

    Raises:
        ConfigError: the time that ranks may take to come is not a number.
        TrainingError: not all have come in time; those that are missing are named with their machine.
    """

    def __init__(self, placed: Placement) -> None:
        self._placed = placed
        restarts, host = int(os.environ.get(RESTART_COUNT, "0")), socket.gethostname()
        own: dict[str, Any] = {"host": host, "restarts": restarts, "token": uuid.uuid4().hex}
        self.again, self._ranks = restarts > 0, {placed.rank: own}
        limit_s = stated_s(JOIN_TIMEOUT, JOIN_TIMEOUT_MINUTES)
        if placed.size == 1:
            return
        import torch.distributed as dist

        where = f"{placed.master_addr}:{placed.master_port}"
        serves = placed.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        try:
            store = dist.TCPStore(
                placed.master_addr,
                placed.master_port,
                is_master=serves,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,  # torch would not say who is missing
                multi_tenant=True,
            )
            self._all = dist.PrefixStore("det-ds", store)
            if placed.rank == 0:
                attempt = self._gather(limit_s)
            else:
                self._all.set(f"rank/{placed.rank}", json.dumps(own))
                attempt = int(self._all.get(own["token"]))
                self._all.set(f"{attempt}/here/{placed.rank}", "")
            store.set_timeout(PATIENCE)
            self._store = dist.PrefixStore(f"det-ds/{attempt}", store)
            self.again = attempt > 1 or any(said["restarts"] for said in self._ranks.values())
        except RuntimeError as error:  # torch's
            reason = str(error).splitlines()[0].partition(". Exception raised")[0]
            words = f"cannot reach rank 0 (machine 0, {where}): {reason}"
            fix = f"look at the launcher's output of machine 0, and whether {where} can be reached from here; {LATER}"
            if serves:
                words = f"cannot listen at {where}: {reason}"
                fix = "set MASTER_ADDR to an address of this machine, and MASTER_PORT to a free port"
            raise TrainingError(f"rank {placed.rank} on {host} {words}\n  fix: {fix}") from None
        if RESTART_COUNT in os.environ:  # the process group of each attempt has keys of its own by it
            os.environ[RESTART_COUNT] = str(attempt - 1)

    def _gather(self, limit_s: float) -> int:
        """Rank 0: wait for the others. Returns the number of the attempt, from 1."""
        attempt, began_s = int(self._all.add("attempts", 1)), time.monotonic()
        missing = set(range(1, self._placed.size))
        while missing:
            for rank in sorted(missing):
                if self._all.check([f"{attempt}/here/{rank}"]):
                    missing.discard(rank)
                elif self._all.check([f"rank/{rank}"]):
                    said = json.loads(self._all.get(f"rank/{rank}"))
                    if said != self._ranks.get(rank):  # one of an earlier attempt does not answer
                        self._ranks[rank] = said
                        self._all.set(said["token"], str(attempt))
            if missing and time.monotonic() - began_s > limit_s:
                here = sorted({said["host"] for rank, said in self._ranks.items() if rank not in missing})
                per_machine = self._placed.local_size
                named = "; ".join(f"machine {rank // per_machine}: rank {rank}" for rank in sorted(missing))
                raise TrainingError(
                    f"{named} has not come within {in_words(limit_s)}; here: {', '.join(here)}\n"
                    "  fix: look at the launcher's output of that machine, and whether it reaches "
                    f"{self._placed.master_addr}:{self._placed.master_port}; {LATER}"
                )
            time.sleep(POLL_S if missing else 0.0)
        return attempt

    # --------------------------------------------------------------------------- once all have come

    def share(self, name: str, value: Any = None) -> Any:
        """A value of rank 0, on all ranks; only rank 0 passes one."""
        if self._placed.size == 1:
            return value
        if self._placed.rank == 0:
            self._store.set(name, json.dumps(value))
            return value
        return json.loads(self._store.get(name))

    def answers(self, answer: Any) -> list[Any]:
        """Every rank's answer, by rank, on rank 0; the others get none."""
        ranks = range(self._placed.size)
        if len(ranks) == 1:
            return [answer]
        self._store.set(f"answer/{self._placed.rank}", json.dumps(answer))
        if self._placed.rank:
            return []
        try:
            self._store.wait([f"answer/{rank}" for rank in ranks], timedelta(seconds=2 * SEEN_WITHIN_S))
        except RuntimeError:  # torch's
            silent = [str(rank) for rank in ranks if not self._store.check([f"answer/{rank}"])]
            message = (
                f"no answer from {', '.join(silent)} of {len(ranks)} ranks; see its launcher's output there"
            )
            raise TrainingError(message) from None
        return [json.loads(self._store.get(f"answer/{rank}")) for rank in ranks]

    def end(self, code: int) -> None:
        """Rank 0: the run has ended; ranks that idle end with this code."""
        with contextlib.suppress(RuntimeError):  # torch's
            if self._placed.size > 1:
                self._store.set("ended", str(code))

    def wait_for_end(self) -> int:
        """A rank that idles: wait until the run has ended. Returns its exit code."""
        with contextlib.suppress(RuntimeError):  # rank 0 took the store along
            while not STOP.wait(POLL_S):
                if self._store.check(["ended"]):
                    return int(self._store.get("ended"))
        return 0

    def leave(self) -> None:
        """Nothing more is exchanged. Rank 0 leaves last, since the store may be its own."""
        if self._placed.size > 1:
            left = self._store.add("left", 1)
            if left == self._placed.size:
                self._store.set("all left", "")
            elif self._placed.rank == 0:
                self._store.wait(["all left"], PATIENCE)
