"""The panel of a run on a terminal, drawn by the chief while it trains.

It is drawn by the thread that trains, between two batches and at most some times a second: no thread could hold a lock
of the terminal while a data loader forks its workers, and none takes time from a step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from determined_ds.report.panel import DrawnPanel
from determined_ds.report.state import VALIDATION, RunState
from determined_ds.rundir.handed_on import PARENT
from determined_ds.rundir.metrics_file import read_records
from determined_ds.rundir.signals import STOP
from determined_ds.train.loop.progress import LogLines

DRAWN_EVERY_S = 0.25
# Of the launcher's words about a first Ctrl-C, which it writes once it has sent the signal: an empty line, and they.
ANNOUNCED_LINES, ANNOUNCED_WITHIN_S = 2, 0.1
STOPPING = "stopping    after this batch, with a checkpoint; again ends at once"


class LivePanel(LogLines):
    """The panel, with notes, warnings, validations and whatever else is printed as lines above it.

    Args:
        records: ``metrics.jsonl`` of the run, for what was reported before it was resumed; None without one.
        console: The terminal; that of this process if None.
        closes: As of :class:`LogLines`.
    """

    def __init__(
        self, records: Path | None = None, *, console: Console | None = None, closes: bool = True
    ) -> None:
        super().__init__(closes=closes)
        self._records = records
        self._panel = DrawnPanel(console)
        self._next_s = math.inf  # nothing is drawn before the start
        self._is_stopping = False
        self._handlers = contextlib.ExitStack()

    # ------------------------------------------------------------------------------------------ events

    def start(
        self, *, total: int | None, done: int, metric: str = "", smaller_is_better: bool = True
    ) -> None:
        super().start(total=total, done=done)
        state = RunState(metric=metric, smaller_is_better=smaller_is_better, total=total, batch=done)
        if done and self._records is not None:
            for record in read_records(self._records):
                state.take(record["group"], record["steps_completed"], record["metrics"])
            state.checkpoint = done
        self._panel.state = state
        self._is_stopping = STOP.is_set()  # then that was announced on a terminal without a panel
        self._panel.start()
        self._handlers.enter_context(_logged_above())
        self._next_s = 0.0

    def step(self, batches_trained: int) -> None:
        now = time.monotonic()
        if now >= self._next_s:
            self._panel.state.at(batches_trained, now)
            self._refresh()

    def status(self, status: str) -> None:
        self._panel.state.status = status
        self._refresh()

    def report(self, group: str, batches_trained: int, metrics: Mapping[str, Any]) -> None:
        self._panel.state.take(group, batches_trained, metrics)
        if group == VALIDATION:
            super().report(group, batches_trained, metrics)
        else:
            self._remember(group, batches_trained, metrics)
            self._refresh_if_due()

    def checkpoints(self, newest: int | None, writing: int | None) -> None:
        state = self._panel.state
        if newest is not None and newest != state.checkpoint:
            state.checkpoint, state.checkpoint_time = newest, time.time()
        state.writing = writing
        self._refresh_if_due()

    def note(self, text: str) -> None:
        self._take_announcement()
        self._panel.note(text)

    def stop(self) -> None:
        self._take_announcement()
        self._handlers.close()
        self._panel.stop()
        self._next_s = math.inf

    # ------------------------------------------------------------------------------------------ drawing

    def _refresh_if_due(self) -> None:
        if time.monotonic() >= self._next_s:
            self._refresh()

    def _refresh(self) -> None:
        if self._panel.is_shown:
            self._take_announcement()
            self._panel.refresh()
            self._next_s = time.monotonic() + DRAWN_EVERY_S

    def _take_announcement(self) -> None:
        """Move what the launcher has written below the panel, as a stop was requested, above it."""
        if self._is_stopping or not STOP.is_set() or not self._panel.is_shown:
            return
        self._is_stopping = True
        if PARENT in os.environ:
            time.sleep(ANNOUNCED_WITHIN_S)
            self._panel.clear_below(ANNOUNCED_LINES)
            self._panel.note(STOPPING)


@contextlib.contextmanager
def _logged_above() -> Iterator[None]:
    """Have handlers of logs that write to this terminal write above the panel."""
    proxies = {
        proxied: stream
        for stream in (sys.stdout, sys.stderr)
        if (proxied := getattr(stream, "rich_proxied_file", None)) is not None
    }
    loggers = [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for handler in {id(each): each for logger in loggers for each in logger.handlers}.values():
        if isinstance(handler, logging.StreamHandler) and handler.stream in proxies:
            moved.append((handler, handler.stream))
            handler.setStream(proxies[handler.stream])
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)
