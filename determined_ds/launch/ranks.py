"""The ranks of a run as processes of this machine: started together, ended together, and how. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import VERIFIED, checkpoints_in, verified_here
from determined_ds.config.layout import Accelerator
from determined_ds.devices import threads_per_rank
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED
from determined_ds.rundir.handed_on import ERROR_FD, LAUNCHED_BY, PARENT, STORE, TERMINAL
from determined_ds.rundir.records import CRASH, HANG, HOST_MEMORY, KILLED
from determined_ds.rundir.run_dir import RunDir
from determined_ds.rundir.signals import NO_HOST_MEMORY, USUAL, Interrupts, oom_kills

GRACE_S = 5.0  # that the other ranks have to end by themselves when one has failed
POLL_S = 0.1
# A rank that reports nothing is found some time after it died; the others may have reported meanwhile.
FOUND_LATE_S = 1.0
# Of another launcher that started this one: not for our ranks.
NOT_OURS = ("MASTER_ADDR", "MASTER_PORT", "DET_CHIEF_IP", LAUNCHED_BY, TERMINAL)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank failed."""

    rank: int
    code: int  # its process's exit code; minus the number of the signal that ended it
    time: float  # when, in seconds since the epoch
    message: str = ""  # what it reported; "" for nothing
    exit_code: int | None = None  # what it wants the launcher to end with; None where it reported nothing
    cause: str = CRASH  # of determined_ds.rundir.records
    reason: str = ""  # in one sentence
    ended_by_us: bool = False  # because of another rank or the user


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the ranks ended."""

    failures: tuple[Failure, ...] = ()  # the first one first; none where all succeeded
    signals: tuple[int, ...] = ()  # those that the user sent

    @property
    def stopped(self) -> bool:
        """Whether the user stopped it, and nothing else went wrong."""
        by_signal = (-signal.SIGKILL, -signal.SIGTERM)
        return bool(self.signals) and all(each.code in by_signal for each in self.failures)

    @property
    def exit_code(self) -> int:
        """0, also when stopped by one signal; 2: it cannot run; 1: it failed; 128 + the number of a second signal."""
        if self.stopped:
            return 0 if len(self.signals) == 1 else 128 + self.signals[-1]
        if not self.failures:
            return 0
        return EXIT_CONFIG if self.failures[0].exit_code == EXIT_CONFIG else EXIT_TRAINING_FAILED

    @property
    def first(self) -> Failure | None:
        """The failure that says why; None where it was stopped, or succeeded."""
        return None if self.stopped or not self.failures else self.failures[0]


def environment_of_ranks(
    num_ranks: int, accelerator: Accelerator, context_dir: Path, variables: Mapping[str, str | None]
) -> dict[str, str]:
    """The environment of the ranks of a machine: this process's, with what they need before they load torch.

    Args:
        num_ranks: On this machine.
        accelerator: What they compute on.
        context_dir: With the trial's code.
        variables: The experiment's environment variables; None for one to remove.
    """
    merged = {**os.environ, **variables, "DS_ACCELERATOR": accelerator.name}
    environment = {name: value for name, value in merged.items() if value is not None}
    paths = [str(context_dir), variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks)))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


def run_ranks(
    command: Sequence[str],
    interrupts: Interrupts,
    *,
    size: int,
    environment: Mapping[str, str],
    cwd: Path,
    run_dir: RunDir,
    keep_open: Sequence[int] = (),
) -> list[Failure]:
    """Start the ranks of a run and wait for them; where one fails, end the others unless they end themselves.

    Returns the failures, the one that came first before the others. The ranks and their children have ended.
    """
    ranks: list[_Rank] = []
    is_stopping, deadline_s = False, float("inf")
    with tempfile.TemporaryDirectory(prefix="det-ds-run-", ignore_cleanup_errors=True) as temporary:
        shared = {name: value for name, value in environment.items() if name not in NOT_OURS}
        shared |= dict.fromkeys(("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE"), str(size))
        shared |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
        shared |= {STORE: f"{temporary}/store", PARENT: str(os.getpid()), VERIFIED: verified_here()}
        try:
            for number in range(size):
                words, theirs = os.pipe()
                os.set_blocking(words, False)
                place = {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FD: str(theirs)}
                try:
                    process = start_process(
                        command,
                        environment={**shared, **place},
                        cwd=cwd,
                        log=run_dir.log(number) if number else None,
                        keep_open=(theirs, *keep_open),
                    )
                finally:
                    os.close(theirs)
                ranks.append(_Rank(process, words))
            while None in (codes := [rank.poll() for rank in ranks]):
                if interrupts.requested and not is_stopping:
                    is_stopping = True
                    for rank in ranks:
                        rank.process.terminate()
                if any(codes):
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                if interrupts.at_once or time.monotonic() >= deadline_s:
                    for rank in ranks:
                        rank.kill()
                time.sleep(POLL_S)
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                if rank.code is None:
                    rank.process.wait()
                    rank.poll()
                os.close(rank.words)
    failures = [rank.failure(number) for number, rank in enumerate(ranks) if rank.code]
    return sorted(failures, key=lambda failure: (failure.ended_by_us, failure.time))


@dataclass
class _Rank:
    """The process of a rank, and the pipe by which it reports why it fails."""

    process: subprocess.Popen[bytes]
    words: int  # the pipe
    killed_before: int = field(default_factory=oom_kills)  # processes, by the kernel, for want of memory
    said: bytes = b""
    code: int | None = None  # once it has ended
    ended_at: float = 0.0
    ended_by_us: bool = False

    def poll(self) -> int | None:
        code = self.process.poll() if self.code is None else None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.words, 2**16):
                self.said += chunk
        if code is not None:
            self.code, self.ended_at = code, time.time()
            self._kill_group()  # the children that it has left behind
        return self.code

    def kill(self) -> None:
        if self.code is None:
            self.ended_by_us = True
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def failure(self, number: int) -> Failure:
        assert self.code
        words: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            words = json.loads(self.said)
        how, cause = f"exit code {self.code}", CRASH
        if self.code < 0:
            named, why = {each.value: each.name for each in signal.Signals}, USUAL.get(-self.code, "")
            if self.code == -signal.SIGKILL:
                is_memory = not self.ended_by_us and oom_kills() > self.killed_before
                cause, why = (HOST_MEMORY, NO_HOST_MEMORY) if is_memory else (KILLED, why)
            how = f"killed by {named.get(-self.code, f'signal {-self.code}')}{why}"
        return Failure(
            rank=number,
            code=self.code,
            message=words.get("message", ""),
            exit_code=words.get("exit_code"),
            cause=words.get("cause", cause),
            reason=words.get("reason") or f"it ended without a message: {how}",
            time=words.get("time", self.ended_at - FOUND_LATE_S),
            ended_by_us=self.ended_by_us and not words,
        )


def start_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    log: Path | None,
    keep_open: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Start a rank, in a session of its own: Ctrl-C at a terminal is for the launcher."""
    with contextlib.nullcontext() if log is None else log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=dict(environment),
            cwd=cwd,
            stdin=None if log is None else subprocess.DEVNULL,
            stdout=output,
            stderr=None if log is None else subprocess.STDOUT,
            pass_fds=keep_open,
            start_new_session=True,
        )


def show_outcome(outcome: Outcome, run_dir: RunDir) -> None:
    """Print why a run failed on stderr, by its first failure, and where the rest is.

    Nothing is printed for a run that is complete, or whose end the closing block describes.
    """
    first = outcome.first
    if first is None:
        if outcome.signals and not checkpoints_in(run_dir.checkpoints):
            print("stopped before the first checkpoint; nothing to resume", file=sys.stderr)
        return
    if first.cause == HANG:
        print(f"\n{first.message.rstrip()}", file=sys.stderr)
    elif first.exit_code == EXIT_CONFIG:
        for problem in re.split(r"\n(?=\S)", first.message.rstrip()):
            print(f"error: {problem}", file=sys.stderr)
    else:
        has_logs = any(log.stat().st_size for log in run_dir.logs.glob("rank*.log"))
        others = f" (the output of the other ranks is in {run_dir.logs})" if has_logs else ""
        words = first.message.rstrip() or first.reason
        print(f"\nrank {first.rank} failed first{others}:\n\n{words}", file=sys.stderr)
