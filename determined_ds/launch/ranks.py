"""The ranks of a run as processes of this machine: started together, watched, ended together. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.checkpoints.files import VERIFIED, remove_partial, verified_here
from determined_ds.config.layout import Accelerator
from determined_ds.devices import threads_per_rank
from determined_ds.launch.interrupts import Interrupts
from determined_ds.launch.outcome import Failure, Outcome, reason_of_code
from determined_ds.rundir.handed_on import (
    ERROR_FD,
    HANG_TIMEOUT,
    HANG_TIMEOUT_MINUTES,
    LAUNCHED_BY,
    PARENT,
    STORE,
    TERMINAL,
)
from determined_ds.rundir.limits import allow_open_files
from determined_ds.rundir.records import CRASH, KILLED
from determined_ds.rundir.run_dir import RunDir

GRACE_S = 5.0  # that the other ranks have to end by themselves when one has failed
POLL_S = 0.1
# A rank that reports nothing is found some time after it died; the others may have reported meanwhile.
FOUND_LATE_S = 1.0
LAST_LINES, LAST_BYTES = 10, 4096
# Of another launcher that started this one: not for our ranks.
NOT_OURS = ("MASTER_ADDR", "MASTER_PORT", "DET_CHIEF_IP", LAUNCHED_BY, TERMINAL)


def run_ranks(
    words: Sequence[str],
    *,
    num_ranks: int,
    accelerator: Accelerator,
    context_dir: Path,
    run_dir: Path,
    variables: Mapping[str, str | None] | None = None,
    keep_open: Sequence[int] = (),
    hang_timeout_s: float = 60 * HANG_TIMEOUT_MINUTES,
) -> Outcome:
    """Start the ranks of a run on this machine, and wait for them.

    Rank 0 writes to this terminal, the others to ``run_dir/logs``. When one dies, the others are ended.
    The first SIGINT, SIGTERM or SIGHUP has the ranks finish their batch and checkpoint; the second ends them.

    Args:
        words: What each runs, after ``python3 -m``.
        num_ranks: Ranks to start.
        accelerator: What they compute on.
        context_dir: Their working directory.
        run_dir: The run directory; it exists.
        variables: The user's environment variables for the ranks; None for one to remove.
        keep_open: Descriptors that the ranks inherit.
        hang_timeout_s: They end where none shows a sign of life for this long; 0: no limit.
    """
    allow_open_files()
    there = RunDir(run_dir)
    there.logs.mkdir(exist_ok=True)
    environment = environment_of_ranks(num_ranks, accelerator, context_dir, variables or {})
    environment[HANG_TIMEOUT] = str(hang_timeout_s / 60)
    ranks = Ranks(
        [sys.executable, "-m", *words],
        size=num_ranks,
        environment=environment,
        cwd=context_dir,
        run_dir=there,
        keep_open=keep_open,
    )
    stops = False

    def pass_on_signals() -> None:
        nonlocal stops
        if interrupts.at_once:
            ranks.kill()
        elif interrupts.requested and not stops:
            stops = True
            ranks.send(signal.SIGTERM)
            interrupts.announce()  # once the ranks have it: who reads it may rely on that

    message = "stopping after this batch, with a checkpoint"
    with Interrupts(message, announced=False) as interrupts, ranks:
        failures = ranks.wait(pass_on_signals)
    if interrupts.at_once and sys.stdout.isatty():
        print()  # after the ^C that the terminal shows
    if failures:
        remove_partial(there.checkpoints)
    return Outcome(failures=tuple(failures), signals=tuple(interrupts.signals))


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
    own = {name: value for name, value in variables.items() if value is not None}
    kept = {name: value for name, value in os.environ.items() if variables.get(name, value) is not None}
    environment = {**kept, **own, "DS_ACCELERATOR": accelerator.name}
    paths = [str(context_dir), own.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks)))
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


class Ranks:
    """The ranks of a run. They run while it is entered; on exit they and their children have ended.

    Args:
        command: What each runs.
        size: Number of ranks.
        environment: Of all of them.
        cwd: Their working directory.
        run_dir: For the logs of the ranks other than rank 0.
        keep_open: Descriptors that they inherit.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        size: int,
        environment: Mapping[str, str],
        cwd: Path,
        run_dir: RunDir,
        keep_open: Sequence[int] = (),
    ) -> None:
        self._command, self._cwd, self._keep_open = command, cwd, keep_open
        self._environment = {name: value for name, value in environment.items() if name not in NOT_OURS}
        self._run_dir = run_dir
        self._size = size
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Ranks:
        self._temporary = tempfile.TemporaryDirectory(prefix="det-ds-run-")
        self._shared = Path(self._temporary.name)
        try:
            for number in range(self._size):
                self._ranks.append(self._start(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, number: int) -> _Rank:
        size = str(self._size)
        places = {"LOCAL_WORLD_SIZE": size, "LOCAL_SIZE": size, "WORLD_SIZE": size}
        places |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
        places |= {"RANK": str(number), "LOCAL_RANK": str(number)}
        handed_on = {STORE: str(self._shared / "store"), PARENT: str(os.getpid()), VERIFIED: verified_here()}
        return _Rank(
            number,
            self._command,
            environment={**self._environment, **places, **handed_on},
            cwd=self._cwd,
            log=self._run_dir.log(number) if number else None,
            keep_open=self._keep_open,
        )

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.close()
        with contextlib.suppress(OSError):
            self._temporary.cleanup()

    def wait(self, look: Callable[[], None]) -> list[Failure]:
        """Wait for all of them; where one fails, end the others unless they end themselves.

        Args:
            look: Called several times a second.

        Returns:
            The failures, the one that came first before the others.
        """
        deadline = float("inf")
        while None in (codes := [rank.poll() for rank in self._ranks]):
            if any(codes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() >= deadline:
                self.kill()
            look()
            time.sleep(POLL_S)
        failures = [failure for rank in self._ranks if (failure := rank.failure())]
        return sorted(failures, key=lambda failure: (failure.ended_by_us, failure.time))

    def send(self, number: signal.Signals) -> None:
        """Send all of them a signal."""
        for rank in self._ranks:
            rank.send(number)

    def kill(self) -> None:
        """End them at once."""
        for rank in self._ranks:
            rank.kill()


class _Rank:
    """One of them. Its output is appended to ``log``, or goes to this terminal where that is None."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        cwd: Path,
        log: Path | None,
        keep_open: Sequence[int],
    ) -> None:
        self._number = number
        self._log = log
        self._log_from = log.stat().st_size if log is not None and log.exists() else 0
        self._said = b""
        self._ended_by_us = False
        self._code: int | None = None
        self._ended_at = 0.0
        self._words, theirs = os.pipe()
        os.set_blocking(self._words, False)
        try:
            own = {**environment, ERROR_FD: str(theirs)}
            self._process = start_process(
                command, environment=own, cwd=cwd, log=log, keep_open=(theirs, *keep_open)
            )
        except BaseException:
            os.close(self._words)
            raise
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        """The exit code once it has ended; reads what it has reported."""
        code = self._process.poll() if self._code is None else None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._words, 2**16):
                self._said += chunk
        if code is not None:
            self._code, self._ended_at = code, time.time()
            self._kill_group()  # the children that it has left behind
        return self._code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it and its children."""
        if self._code is None:
            self._ended_by_us = True
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it if it runs, and release what it held."""
        if self._code is None:
            self.kill()
            self._process.wait()
            self.poll()
        os.close(self._words)

    def failure(self) -> Failure | None:
        """How it failed; None where it succeeded."""
        if not self._code:
            return None
        words: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            words = json.loads(self._said)
        last_lines = ""
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("rb") as file:
                file.seek(max(self._log_from, self._log.stat().st_size - LAST_BYTES))
                last_lines = "\n".join(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
        return Failure(
            rank=self._number,
            code=self._code,
            message=str(words.get("message", "")),
            exit_code=words.get("exit_code"),
            cause=str(words.get("cause", KILLED if self._code == -signal.SIGKILL else CRASH)),
            reason=str(words.get("reason", "")) or reason_of_code(self._code),
            time=float(words.get("time", self._ended_at - FOUND_LATE_S)),
            ended_by_us=self._ended_by_us and not words,
            last_lines=last_lines,
        )


def start_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    log: Path | None,
    keep_open: Sequence[int],
) -> subprocess.Popen[bytes]:
    """Start a rank, in a session of its own: Ctrl-C at a terminal is for the launcher.

    Args:
        command: To run.
        environment: Its whole environment.
        cwd: Its working directory.
        log: Where its output is appended; None: to this terminal.
        keep_open: Descriptors that it inherits.
    """
    with contextlib.ExitStack() as stack:
        output = None if log is None else stack.enter_context(log.open("ab"))
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
