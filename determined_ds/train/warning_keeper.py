"""Warnings of a rank kept in a file, beside where they are shown. What is shown does not change. Loads no torch."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from determined_ds.rundir.heartbeat import HEART
from determined_ds.rundir.records import KeptWarning, append_warning, kind_of

MOST_KINDS = 200  # a message with a new name in it at every batch would fill a disk


class WarningKeeper:
    """Keeps what this process warns of: by ``warnings``, by any logger at level WARNING or above, by our own notes.

    A logger's handlers stay as they are: one more at the root would silence the handler of last resort, and make
    ``logging.basicConfig`` do nothing.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._rank = 0
        self._forget()

    def begin(self, folder: Path, rank: int) -> None:
        """Keep warnings from now on.

        Args:
            folder: ``logs`` of the run directory.
            rank: Of this process.
        """
        if self._folder is None:
            self._watch()
            # A worker of a data loader counts its own, and may be forked while another thread holds the lock.
            os.register_at_fork(after_in_child=self._forget)
        self._forget()
        self._folder, self._rank = folder, rank

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._kinds: dict[tuple[str, str], KeptWarning] = {}  # each with its count in all
        self._written: dict[tuple[str, str], int] = {}  # how many of them the file has

    def keep(self, message: str, *, source: str, level: str = "WARNING") -> None:
        """Keep a warning that is shown elsewhere."""
        if self._folder is None:
            return
        with self._lock:
            kind, now = kind_of(source, message), time.time()
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                source, level = "determined_ds", "WARNING"
                message = "more warnings of other kinds came, which are not kept"
                kind = kind_of(source, message)
            known = self._kinds.get(kind) or KeptWarning(
                message=message, source=source, level=level, count=0, time=now, steps_completed=HEART.steps
            )
            self._kinds[kind] = known = replace(known, count=known.count + 1, last_time=now)
            if known.count & (known.count - 1) == 0:  # 1, 2, 4, 8, ...
                self._write(kind, known)

    def _write(self, kind: tuple[str, str], warning: KeptWarning) -> None:
        new = warning.count - self._written.get(kind, 0)
        if new and self._folder is not None:
            append_warning(self._folder, replace(warning, count=new), self._rank)
            self._written[kind] = warning.count

    def end(self) -> None:
        """Write what has been counted and not been written."""
        with self._lock:
            for kind, warning in self._kinds.items():
                self._write(kind, warning)

    def _watch(self) -> None:
        """After the filters, whatever the handlers: loggers that do not propagate, too."""
        log, show = logging.Logger.callHandlers, warnings.showwarning

        @functools.wraps(log)
        def log_and_keep(logger: logging.Logger, record: logging.LogRecord) -> None:
            log(logger, record)
            if record.levelno >= logging.WARNING:
                try:
                    message = record.getMessage()
                except (
                    TypeError,
                    ValueError,
                ):  # arguments that do not fit: logging itself complains on stderr
                    message = str(record.msg)
                error = record.exc_info[1] if record.exc_info else None
                if error is not None:
                    message += f" ({type(error).__name__}: {error})"
                self.keep(message.removeprefix("warning: "), source=record.name, level=record.levelname)

        @functools.wraps(show)
        def show_and_keep(
            message: Any, category: Any, filename: str, lineno: int, *more: Any, **named: Any
        ) -> None:
            show(message, category, filename, lineno, *more, **named)
            if show.__module__ != "logging":  # logging.captureWarnings(True): a logger has it
                self.keep(str(message), source=f"{category.__name__} {filename}:{lineno}")

        logging.Logger.callHandlers = log_and_keep  # type: ignore[method-assign, assignment]
        warnings.showwarning = show_and_keep


KEEPER = WarningKeeper()


def warned(text: str) -> str:
    """Keep a warning of our own that is shown as a line among the metrics; gives it back."""
    KEEPER.keep(text.removeprefix("warning: "), source="determined_ds")
    return text
