"""The launcher's watch over its ranks: where none makes progress, it finds out which one hangs, and ends them."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from determined_ds.launch.ranks import Ranks
from determined_ds.rundir.handed_on import HANG_TIMEOUT_MINUTES
from determined_ds.rundir.heartbeat import SHOWN_FRAMES, WAITS, Beat, read_heartbeats

HANG_TIMEOUT_S = 60 * HANG_TIMEOUT_MINUTES
# A longer time between two looks was spent by the launcher itself: asleep, or held by a debugger.
LONGEST_S = 1.0
# Ranks write their stacks at once; reading them from the disk may take longer.
ANSWER_S = 3.0
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A run in which no rank made progress.

    Args:
        seconds: How long.
        steps: Batches trained by the slowest rank.
        behind: The ranks that the others wait for; all of them where that is unknown.
        stacks: Of each rank, innermost call first; "" where it did not answer.
    """

    seconds: float
    steps: int
    behind: tuple[int, ...]
    stacks: tuple[str, ...] = ()


class HangWatch:
    """Watches ranks from the moment that they have joined.

    Args:
        ranks: That run.
        timeout_s: How long they may show no sign of life; 0: no limit.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._signs: list[Beat] = []
        self._looked_at_s = time.monotonic()
        self._waited_s = 0.0
        self.hang: Hang | None = None

    def look(self) -> None:
        """Check for progress, and end the ranks where there was none for too long."""
        now_s = time.monotonic()  # which stands still while a machine sleeps
        elapsed_s, self._looked_at_s = min(LONGEST_S, now_s - self._looked_at_s), now_s
        if not self._timeout_s or self.hang:
            return
        signs = read_heartbeats(self._ranks.heartbeats)
        begun = any(sign.beats for sign in signs)
        if not begun or signs != self._signs or any(sign.patient for sign in signs):
            self._signs, self._waited_s = signs, 0.0
            return
        self._waited_s += elapsed_s
        if self._waited_s >= self._timeout_s:
            self._waited_s = 0.0
            if not any(_is_stopped(pid) for pid in self._ranks.pids):  # by a debugger
                self.hang = self._ask()
                self._ranks.kill()

    def _ask(self) -> Hang:
        before = [log.stat().st_size if log.exists() else 0 for log in self._ranks.logs]
        self._ranks.send(signal.SIGUSR1)
        until = time.monotonic() + ANSWER_S
        stacks: list[str] = []
        while time.monotonic() < until:
            time.sleep(0.2)
            said, stacks = stacks, self._answers(before)
            if all(stacks) and said == stacks:
                break
        behind = _behind(self._signs, stacks)
        return Hang(
            seconds=self._timeout_s,
            steps=min(sign.steps for sign in _counting(self._signs)),
            behind=tuple(behind),
            stacks=tuple("\n".join(_threads(each)[-1]) for each in stacks),
        )

    def _answers(self, before: list[int]) -> list[str]:
        answers = []
        for log, start in zip(self._ranks.logs, before, strict=True):
            try:
                answers.append(log.read_bytes()[start:].decode(errors="replace"))
            except OSError:
                answers.append("")
        return answers


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in STOPPED
    except psutil.Error:
        return False


def _behind(signs: list[Beat], stacks: list[str]) -> list[int]:
    """Of the ranks that have trained the fewest batches, those that do not wait for another; else all of them."""
    counting = _counting(signs)
    fewest = min(sign.steps for sign in counting)
    slowest = [rank for rank, sign in enumerate(signs) if sign.steps == fewest or sign not in counting]
    busy = [rank for rank in slowest if not any(map(_waits, _threads(stacks[rank])))]
    return busy or slowest


def _counting(signs: list[Beat]) -> list[Beat]:
    """The signs by whose batches ranks are compared: of a script, only rank 0 reports any.

    A rank that is behind the others in its first batch is behind by one.
    """
    return [sign for sign in signs if sign.steps] if max(sign.steps for sign in signs) > 1 else signs


def _threads(dump: str) -> list[list[str]]:
    """The innermost frames of each thread; ``faulthandler`` writes the main thread last."""
    threads = [thread.splitlines() for thread in dump.rstrip().split("\n\n")]
    return [[line for line in thread if line.startswith("  File ")][:SHOWN_FRAMES] for thread in threads]


def _waits(frames: list[str]) -> bool:
    return any(word in frame for frame in frames for word in WAITS)
