"""The chief's end of the process that its tools are in: a queue that never makes training wait. Loads no torch."""

from __future__ import annotations

import contextlib
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import determined_ds
from determined_ds.config.loggers import TOOLS
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.launches import Launch
from determined_ds.train.logs.flattening import named
from determined_ds.train.logs.messages import (
    BEGIN,
    END,
    ENDED,
    FAILED,
    NOTE,
    REPORT,
    WARNING,
    NumbersAt,
    ShownRun,
    line_of,
    message_in,
)

logger = logging.getLogger("determined_ds")

MOST_WAITING = 10_000  # messages that the process has not read
# How long the end of a run waits for its tools; that of one that failed, for which other ranks wait, is short.
LAST_S, LAST_OF_FAILED_S = 30.0, 4.0
# Beyond that, for the process itself.
MORE_S = 2.0
# With this package's folder in place of the current one, no client imports a user's csv.py.
PROGRAM = "import sys; sys.path[0] = sys.argv.pop(1); from determined_ds.train.logs.tools_process import main; main()"


class TeamTools:
    """A :class:`~determined_ds.train.logs.sink.Sink`: sends a run's metrics to the tools of its configuration.

    Args:
        about: Says what the tools show, once training begins.
        log: Where the clients' own messages go.
    """

    def __init__(self, about: Callable[[Launch], ShownRun], log: Path) -> None:
        self._about = about
        self._log = log
        self._log_shown = str(log)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._num_lost = 0
        self._has_ended = False
        self._threads: list[threading.Thread] = []
        self._closed: dict[str, tuple[int, bool]] | None = None
        self._tools: tuple[str, ...] = ()

    def begin(self, launch: Launch) -> None:
        """Start the process."""
        about = self._about(launch)
        self._log_shown = about.later(str(self._log))
        self._tools = tuple(about.tools)
        package = str(Path(determined_ds.__file__).parents[1])
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, package],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._listen)]
        for thread in self._threads:
            thread.start()
        self._put(line_of(BEGIN, about))

    def report(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Send metrics."""
        numbers = named(group, metrics)
        if numbers:
            self._put(line_of(REPORT, NumbersAt(int(steps_completed), round(time.time(), 3), numbers)))

    def end(self, status: str) -> None:
        """Close the run in every tool; waits for them, but not for long."""
        if self._process is None:
            return
        wait_s = LAST_OF_FAILED_S if status == FAILED else LAST_S
        until = time.monotonic() + wait_s + MORE_S
        with HEART.patiently():
            for last in (line_of(END, (status, wait_s)), None):
                with contextlib.suppress(queue.Full):
                    self._lines.put(last, timeout=wait_s)
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))
        self._has_ended = True
        self._process.kill()
        self._process.wait()
        self._process = None
        self._say_what_is_lost()

    # ------------------------------------------------------------------------------------ in threads

    def _put(self, line: bytes | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._num_lost += 1

    def _write(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._lines.get()) is not None:
                    pipe.write(line)
                    if self._lines.empty():
                        pipe.flush()
        except OSError:
            if not self._has_ended:
                names = ", ".join(self._tools)
                text = "warning: the run continues, and is not reported to %s any more: see %s"
                logger.warning(text, names, self._log_shown)

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, content = message_in(line)
            if kind == NOTE:
                print(content, flush=True)
            elif kind == WARNING:
                name, text = content
                logger.warning(
                    "warning: %s %s; see %s\n  fix: %s", name, text, self._log_shown, TOOLS[name].fix
                )
            elif kind == ENDED:
                self._closed = {name: (unsent, closed) for name, (unsent, closed) in content.items()}

    def _say_what_is_lost(self) -> None:
        closed = self._closed or {}
        for name in self._tools:
            unsent, is_closed = closed.get(name, (0, False))
            unsent += self._num_lost
            if unsent or not is_closed:
                what = (
                    f"has not taken {count(unsent, 'report')} of metrics"
                    if unsent
                    else "has not closed the run"
                )
                text = "warning: %s %s; see %s\n  fix: %s"
                logger.warning(text, TOOLS[name].title, what, self._log_shown, TOOLS[name].fix)
