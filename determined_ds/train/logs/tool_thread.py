"""A tool in a thread of its own: what it fails to take is offered again, what is lost is counted. Loads no torch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from determined_ds.train.logs.messages import NumbersAt

# Reports that wait for a tool; more than a day of one a minute, or of an hour of three a second.
MOST_WAITING = 10_000
MOST_AT_ONCE = 500
# Between two deliveries: a tool takes several reports more cheaply than each of them.
EVERY_S = 1.0
# Between tries, where a tool fails.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
# A delivery that takes so long is warned of.
SLOW_S = 60.0


class Tool(Protocol):
    """What a tool's client is asked to do; it may wait, and raise."""

    def begin(self) -> str:
        """Open the run, or continue it. Returns where people find it; "" for nothing to say."""

    def report(self, reports: list[NumbersAt]) -> None:
        """Send reports, the oldest first."""

    def end(self, status: str) -> None:
        """Close the run: ``completed``, ``stopped`` or ``failed``."""


class ToolThread:
    """Delivers to one tool.

    Args:
        name: Of the tool.
        tool: It.
        say: Called with a text for people.
        warn: Called with a warning, once for each kind of trouble.
    """

    def __init__(
        self, name: str, tool: Tool, *, say: Callable[[str], None], warn: Callable[[str], None]
    ) -> None:
        self.name = name
        self._tool = tool
        self._say, self._warn = say, warn
        self._waiting: deque[NumbersAt] = deque()
        self._changed = threading.Condition()
        self._status = ""
        self._lost = 0
        self._warned: set[str] = set()
        self._busy_since: float | None = None
        self._is_ending = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def num_unsent(self) -> int:
        """Reports that the tool has not taken: lost already, or waiting."""
        with self._changed:
            return self._lost + len(self._waiting)

    @property
    def is_closed(self) -> bool:
        """Whether the tool has closed the run."""
        return self._is_over

    def put(self, report: NumbersAt) -> None:
        """Offer a report; the oldest is lost where too many wait."""
        with self._changed:
            self._waiting.append(report)
            if len(self._waiting) > MOST_WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._changed.notify()
        if self._busy_since is not None and time.monotonic() - self._busy_since > SLOW_S:
            self._once("slow", f"has not answered for {SLOW_S:.0f} s; the run continues")

    def finish(self, status: str) -> None:
        """Have the tool take what waits, and close the run."""
        with self._changed:
            self._status = status
            self._changed.notify()
        self._is_ending.set()

    def join(self, until: float) -> None:
        """Wait until the tool has closed the run, at most until this moment of :func:`time.monotonic`."""
        self._thread.join(max(0.0, until - time.monotonic()))

    # ------------------------------------------------------------------------------------ in the thread

    def _work(self) -> None:
        self._until_done(self._begin)
        while True:
            reports = self._next()
            if not reports:
                break
            self._until_done(lambda reports=reports: self._tool.report(reports))  # type: ignore[misc]
            with self._changed:
                for report in reports:
                    if self._waiting and self._waiting[0] is report:  # else it was lost, and counted
                        self._waiting.popleft()
        self._until_done(lambda: self._tool.end(self._status))
        self._is_over = True

    def _begin(self) -> None:
        where = self._tool.begin()
        if where:
            self._say(f"{self.name}: {where}")

    def _next(self) -> list[NumbersAt]:
        """The reports to deliver next; none where the run has ended and all are delivered."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._status)
            if not self._status:
                self._changed.wait_for(lambda: self._status, timeout=EVERY_S)
            return [self._waiting[index] for index in range(min(MOST_AT_ONCE, len(self._waiting)))]

    def _until_done(self, step: Callable[[], None]) -> None:
        wait_s = FIRST_WAIT_S
        while True:
            self._busy_since = time.monotonic()
            try:
                step()
                return
            except Exception as error:
                reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
                self._once("fails", f"does not take the run, which continues: {reason}; it is tried again")
            finally:
                self._busy_since = None
            if self._is_ending.wait(wait_s):
                time.sleep(FIRST_WAIT_S)
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(text)
