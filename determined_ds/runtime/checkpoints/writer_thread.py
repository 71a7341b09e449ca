"""A thread of a rank that writes checkpoints while training continues, one after the other."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
NICENESS = 10
ENDS_WITHIN_S = 10.0  # a disk that hangs does not keep a rank that has failed


class Abandoned(Exception):
    """Raised in the thread: the run ends, and what is written is not needed."""


class WriterThread:
    """Does work in the order in which it is given.

    It is a daemon, so a rank that fails does not wait for a slow disk. It takes part in no exchange between ranks.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[Callable[[], None]], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_abandoned = False

    def submit(self, work: Callable[[Callable[[], None]], T]) -> Future[T]:
        """Have work done.

        Args:
            work: Called with a function that it calls now and then, and that ends it where the run ends.

        Returns:
            What comes of it.
        """
        result: Future[T] = Future()
        self._jobs.put((work, result))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
            self._thread.start()
        return result

    def abandon(self) -> None:
        """End what is being done, do nothing more, and wait for the thread: the interpreter must not end under it."""
        self._is_abandoned = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(ENDS_WITHIN_S)

    def _run(self) -> None:
        _give_way()
        while True:
            job = self._jobs.get()
            if job is None:
                return
            work, result = job
            del job
            try:
                self._beat()
                result.set_result(work(self._beat))
            except BaseException as error:  # raised where the result is taken
                result.set_exception(error)
            del work, result  # with the copies that they hold

    def _beat(self) -> None:
        if self._is_abandoned:
            raise Abandoned


def _give_way() -> None:
    """Take the time of processors that training leaves. On Linux a thread has a priority of its own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
