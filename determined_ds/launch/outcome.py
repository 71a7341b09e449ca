"""How the ranks of a run ended: for ``result.json``, for the exit code, and in words for the user."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED
from determined_ds.rundir.records import CRASH, HANG, status_of
from determined_ds.rundir.run_dir import RunDir
from determined_ds.rundir.signals import USUAL


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
    def status(self) -> str:
        """As ``result.json`` has it, like the two below."""
        return status_of(self.exit_code, stopped=self.stopped)

    @property
    def cause(self) -> str | None:
        return None if self.stopped or not self.failures else self.failures[0].cause

    @property
    def reason(self) -> str | None:
        return None if self.cause is None else self.failures[0].reason


def show_outcome(outcome: Outcome, run_dir: RunDir) -> None:
    """Print why a run failed on stderr; nothing for a complete one, or one whose end the closing block describes."""
    if outcome.cause == HANG:
        print(f"\n{outcome.failures[0].message.rstrip()}", file=sys.stderr)
    elif outcome.cause is not None:
        show_failure(outcome.failures[0], run_dir)
    elif outcome.signals and not checkpoints_in(run_dir.checkpoints):
        print("stopped before the first checkpoint; nothing to resume", file=sys.stderr)


def show_failure(first: Failure, run_dir: RunDir) -> None:
    """Print why the first rank failed on stderr, and where the rest is."""
    if first.exit_code == EXIT_CONFIG:
        for problem in re.split(r"\n(?=\S)", first.message.rstrip()):
            print(f"error: {problem}", file=sys.stderr)
        return
    others = ""
    if any(log.stat().st_size for log in run_dir.logs.glob("rank*.log")):
        others = f" (the output of the other ranks is in {run_dir.logs})"
    words = first.message.rstrip() or first.reason
    print(f"\nrank {first.rank} failed first{others}:\n\n{words}", file=sys.stderr)


def reason_of_code(code: int) -> str:
    """Why a process that has reported nothing has ended, by its exit code."""
    if code >= 0:
        return f"it ended without a message: exit code {code}"
    named = {each.value: each.name for each in signal.Signals}.get(-code, f"signal {-code}")
    return f"it ended without a message: killed by {named}{USUAL.get(-code, '')}"
