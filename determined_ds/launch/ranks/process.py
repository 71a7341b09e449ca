"""A rank as a process of this machine: started, listened to, ended with its children. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.rundir.conclusion import CRASH, KILLED
from determined_ds.rundir.handed_on import ERROR_FD

# A rank that reports nothing is found some time after it died; the others may have reported meanwhile.
FOUND_LATE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank failed.

    Args:
        rank: Which.
        code: Its process's exit code; minus the number of the signal that ended it.
        message: What it reported; "" for nothing.
        exit_code: What it wants the launcher to end with; None where it reported nothing.
        cause: A cause of :mod:`determined_ds.rundir.conclusion`.
        reason: The message in one sentence; "" where it reported nothing.
        time: When, in seconds since the epoch.
        ended_by_us: Whether the launcher ended it, because of another rank or the user.
        last_lines: The end of what it wrote to its log; "" for rank 0, which writes to the terminal.
    """

    rank: int
    code: int
    message: str = ""
    exit_code: int | None = None
    cause: str = CRASH
    reason: str = ""
    time: float
    ended_by_us: bool = False
    last_lines: str = ""


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


class Rank:
    """One of them.

    Args:
        number: Its rank.
        command: To run.
        environment: Its whole environment, but what is added here.
        cwd: Its working directory.
        log: As for :func:`start_process`.
        keep_open: As for :func:`start_process`.
    """

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
        self.number = number
        self._log = log
        self._log_from = log.stat().st_size if log is not None and log.exists() else 0
        self._said = b""
        self._ended_by_us = False
        self._code: int | None = None
        self._ended_at = 0.0
        self._words, theirs = os.pipe()
        os.set_blocking(self._words, False)
        own = {"RANK": str(number), "LOCAL_RANK": str(number), ERROR_FD: str(theirs)}
        try:
            self._process = start_process(
                command, environment={**environment, **own}, cwd=cwd, log=log, keep_open=(theirs, *keep_open)
            )
        except BaseException:
            os.close(self._words)
            raise
        finally:
            os.close(theirs)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended; reads what it has reported."""
        self._listen()
        if self._code is None and (code := self._process.poll()) is not None:
            self._code, self._ended_at = code, time.time()
            self._listen()
            self._kill_group()  # the children that it has left behind
        return self._code

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._words, 2**16):
                self._said += chunk

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and its children."""
        if self._code is None:
            self._ended_by_us = True
            self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

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
        return Failure(
            rank=self.number,
            code=self._code,
            message=str(words.get("message", "")),
            exit_code=words.get("exit_code"),
            cause=str(words.get("cause", KILLED if self._code == -signal.SIGKILL else CRASH)),
            reason=str(words.get("reason", "")),
            time=float(words.get("time", self._ended_at - FOUND_LATE_S)),
            ended_by_us=self._ended_by_us and not words,
            last_lines=self._last_lines(),
        )

    def _last_lines(self, count: int = 10) -> str:
        if self._log is None:
            return ""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(self._log_from, self._log.stat().st_size - 4096))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
        return ""
