"""How the ranks of a run ended: for ``result.json``, for the exit code, and in words for the user."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from determined_ds.checkpoints.files import checkpoints_in
from determined_ds.errors import EXIT_CONFIG, EXIT_TRAINING_FAILED
from determined_ds.rundir.records import CRASH, HANG, status_of
from determined_ds.rundir.run_dir import RunDir
from determined_ds.rundir.signals import USUAL


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a rank failed.

    Args:
        rank: Which.
        code: Its process's exit code; minus the number of the signal that ended it.
        message: What it reported; "" for nothing.
        exit_code: What it wants the launcher to end with; None where it reported nothing.
        cause: A cause of :mod:`determined_ds.rundir.records`.
        reason: In one sentence.
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


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the ranks ended.

    Args:
        failures: The first one first; none where all succeeded.
        signals: Those that the user sent.
    """

    failures: tuple[Failure, ...] = ()
    signals: tuple[int, ...] = ()

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


def show_outcome(outcome: Outcome, run_dir: Path, resume_with: str, *, closes: bool = False) -> None:
    """Print why a run failed, or how to resume one that was stopped, on stderr; nothing for a complete one.

    Args:
        outcome: How the ranks ended.
        run_dir: Of the run.
        resume_with: The command.
        closes: Whether a closing block follows, which has the command.
    """
    there = RunDir(run_dir)
    if outcome.cause == HANG:
        kept = checkpoints_in(there.checkpoints)
        last = f"the last checkpoint is {kept[0].path}" if kept else "no checkpoint was made yet"
        resume = [f"  fix: resume from it with: {resume_with}"] if kept else []
        print(f"\n{outcome.failures[0].message.rstrip()}", last, *resume, sep="\n", file=sys.stderr)
    elif not outcome.stopped and outcome.failures:
        show_failure(outcome.failures[0], there)
    elif outcome.signals and not checkpoints_in(there.checkpoints):
        print("stopped before the first checkpoint; nothing to resume", file=sys.stderr)
    elif outcome.signals and not closes:
        print(f"resume with: {resume_with}", file=sys.stderr)


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
    if not first.message and first.last_lines:
        words = f"the last lines of its log:\n{first.last_lines}\n\n{words}"
    print(f"\nrank {first.rank} failed first{others}:\n\n{words}", file=sys.stderr)


def reason_of_code(code: int) -> str:
    """Why a process that has reported nothing has ended, by its exit code."""
    how = f"exit code {code}"
    if code < 0:
        known = -code in {each.value for each in signal.Signals}
        number = signal.Signals(-code) if known else None
        how = f"killed by {number.name if number else f'signal {-code}'}{USUAL.get(number, '') if number else ''}"
    return f"it ended without a message: {how}"
