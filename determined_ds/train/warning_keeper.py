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

from determined_ds.rundir.records import KeptWarning, append_warning, kind_of
from determined_ds.rundir.signals import HEART

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
        """Keep the warnings of this rank from now on, in ``logs`` of the run directory."""
        if self._folder is None:
            self._watch()
            # A worker of a data loader counts its own, and may be forked while another thread holds the lock.
            os.register_at_fork(after_in_child=self._forget)
        self._forget()
        self._folder, self._rank = folder, rank

    def _forget(self) -> None:
        self._lock = threading.RLock()
        self._kinds: dict[tuple[str, str], KeptWarning] = {}  # each with its count since its last line

    def keep(self, message: str, *, source: str, level: str = "WARNING") -> None:
        """Keep a warning that is shown elsewhere: its first one at once, the others with the end of the run."""
        if self._folder is None:
            return
        with self._lock:
            kind, now = kind_of(source, message), time.time()
            known = self._kinds.get(kind)
            if known is not None:
                self._kinds[kind] = replace(known, count=known.count + 1, last_time=now)
            elif len(self._kinds) < MOST_KINDS:
                new = KeptWarning(
                    message=message, source=source, level=level, last_time=now, steps_completed=HEART.steps
                )
                append_warning(self._folder, new, self._rank)
                self._kinds[kind] = replace(new, count=0)

    def end(self) -> None:
        """Write how often each has come since its first line."""
        with self._lock:
            for kind, warning in self._kinds.items():
                if warning.count and self._folder is not None:
                    append_warning(self._folder, warning, self._rank)
                    self._kinds[kind] = replace(warning, count=0)

    def _watch(self) -> None:
        """After the filters, whatever the handlers: loggers that do not propagate, too."""
        log, show = logging.Logger.callHandlers, warnings.showwarning

        @functools.wraps(log)
        def log_and_keep(logger: logging.Logger, record: logging.LogRecord) -> None:
            log(logger, record)
            if record.levelno >= logging.WARNING:
                try:
                    message = record.getMessage()
                except (TypeError, ValueError):  # arguments that do not fit: logging itself complains
                    message = str(record.msg)
                if record.exc_info and record.exc_info[1] is not None:
                    message += f" ({record.exc_info[1]!r})"
                self.keep(message.removeprefix("warning: "), source=record.name, level=record.levelname)

        @functools.wraps(show)
        def show_and_keep(
            message: Any, category: Any, filename: str, lineno: int, *to: Any, **how: Any
        ) -> None:
            show(message, category, filename, lineno, *to, **how)
            if show.__module__ != "logging":  # logging.captureWarnings(True): a logger has it
                self.keep(str(message), source=f"{category.__name__} {filename}:{lineno}")

        logging.Logger.callHandlers = log_and_keep  # type: ignore[method-assign, assignment]
        warnings.showwarning = show_and_keep


KEEPER = WarningKeeper()


def warned(text: str) -> str:
    """Keep a warning of our own that is shown as a line among the metrics; gives it back."""
    KEEPER.keep(text.removeprefix("warning: "), source="determined_ds")
    return text
