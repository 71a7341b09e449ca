"""The process that a run's tools are in: reads messages of the chief, and ends with it. Loads no torch.

It is the chief's child, and not a part of it: clients of tools wait, start threads, and wrap functions of torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import IO

from determined_ds.train.logs.messages import (
    BEGIN,
    END,
    ENDED,
    FAILED,
    NOTE,
    REPORT,
    WARNING,
    ShownRun,
    line_of,
    message_in,
)
from determined_ds.train.logs.tool_thread import ToolThread
from determined_ds.train.logs.tools import make_tool

# How long tools have to take what waits, once the chief is gone without a word.
ABANDONED_S = 10.0
# Training goes first where there are fewer cores than work: clients take seconds to load.
NICE = 10


class Tools:
    """The tools of a run, each in its thread.

    Args:
        answers: Where messages for the chief are written.
    """

    def __init__(self, answers: IO[bytes]) -> None:
        self._answers = answers
        self._writing = threading.Lock()
        self._threads: list[ToolThread] = []

    def serve(self, lines: Iterable[bytes]) -> None:
        """Take messages until the run has ended, or the chief is gone."""
        status, wait_s = FAILED, ABANDONED_S
        for line in lines:
            kind, content = message_in(line)
            if kind == BEGIN:
                self._begin(content)
            elif kind == REPORT:
                for thread in self._threads:
                    thread.put(content)
            elif kind == END:
                status, wait_s = content
                break
        self._end(status, time.monotonic() + wait_s)

    def _begin(self, about: ShownRun) -> None:
        for name in about.tools:
            self._threads.append(
                ToolThread(
                    name,
                    make_tool(name, about),
                    say=lambda text: self._answer(NOTE, text),
                    warn=lambda text, name=name: self._answer(WARNING, (name, text)),  # type: ignore[misc]
                )
            )

    def _end(self, status: str, until: float) -> None:
        for thread in self._threads:
            thread.finish(status)
        for thread in self._threads:
            thread.join(until)
        self._answer(ENDED, {each.name: [each.num_unsent, each.is_closed] for each in self._threads})

    def _answer(self, kind: str, content: object) -> None:
        with self._writing:
            try:
                self._answers.write(line_of(kind, content))
                self._answers.flush()
            except OSError:  # the chief is gone
                pass


def main() -> None:
    """Serve the chief, whose messages come by standard input; what clients print goes where errors go."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the chief is asked to stop, and says when it has
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    Tools(answers).serve(sys.stdin.buffer)
    os._exit(0)  # threads of clients may hang
