"""Writing beside training: whether it is worth it and memory suffices for the copies, and the thread that does it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from determined_ds.checkpoints.engines import Engines, overrides
from determined_ds.errors import ConfigError, Problem
from determined_ds.memory.units import MIB, format_bytes

T = TypeVar("T")
# Where nothing is stated, a rank that writes less does so at once: it takes about as long as to agree that it was
# written.
SMALL_BYTES = 16 * MIB
COPIES = 2  # one that is being written, and one that is made meanwhile
CGROUP = Path("/sys/fs/cgroup")
NICENESS = 10
ENDS_WITHIN_S = 10.0  # a disk that hangs does not keep a rank that has failed


def is_beside(
    asynchronous: Literal[True] | None,
    trial: Any,
    engines: Engines,
    distributed: Any,
    note: Callable[[str], None],
    *,
    part_bytes: int,
) -> bool:
    """Whether checkpoints are written while training continues, decided before it; a collective."""
    lack = engines.own_layouts[0] if all(engines.own_layouts) else ""
    if not asynchronous and (lack or overrides(trial, "save")):
        return False
    if not lack:
        own = (distributed.cross_rank, engines.copy_bytes() + part_bytes, _available_bytes())
        ranks: list[tuple[int, int, int]] = distributed.allgather(own)
        if not asynchronous and max(copy for _, copy, _ in ranks) < SMALL_BYTES:
            return False
        for machine in {machine for machine, _, _ in ranks}:
            copies, left = zip(*(each[1:] for each in ranks if each[0] == machine), strict=True)
            if COPIES * sum(copies) > min(left):
                write = "1 rank writes" if len(copies) == 1 else f"{len(copies)} ranks write"
                lack = f"two copies of what {write} take {format_bytes(COPIES * sum(copies))} of host memory, and "
                lack += f"{format_bytes(min(left))} are available"
        if lack and asynchronous:
            key = "hyperparameters.fit.asynchronous_checkpoints"
            fix = (
                "leave it out, and checkpoints are written while training waits; or use fewer slots a machine"
            )
            raise ConfigError(Problem(key=key, value=True, message=lack, fix=fix, code="host-memory"))
    if lack:
        note(f"note        checkpoints are written while training waits: {lack}")
    return not lack


def _available_bytes() -> int:
    """Memory that this machine, or this container, has left; what the system caches of files counts as left."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        numbers = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return min(available, limit - used + int(numbers["file"]))
    except (OSError, ValueError, KeyError):  # no limit, or cgroups of version 1
        return available


class Abandoned(Exception):
    """Raised in the thread: the run ends, and what is written is not needed."""


class WriterThread:
    """Does work in the order in which it is given; it takes part in no exchange between ranks.

    Each work has a thread, which waits for the one before: a daemon, so a rank that fails does not wait for a slow
    disk.
    """

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._is_abandoned = False

    def submit(self, work: Callable[[Callable[[], None]], T]) -> Future[T]:
        """Have work done; it gets a function to call now and then, which ends it where the run ends."""
        result: Future[T] = Future()
        arguments = (work, result, self._last)
        self._last = threading.Thread(target=self._run, args=arguments, name="checkpoint-writer", daemon=True)
        self._last.start()
        return result

    def abandon(self) -> None:
        """End what is being done, do nothing more, and wait for the thread: the interpreter must not end under it."""
        self._is_abandoned = True
        if self._last is not None:
            self._last.join(ENDS_WITHIN_S)

    def _run(self, work: Callable[..., Any], result: Future[Any], before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        if (
            sys.platform == "linux"
        ):  # a thread has a priority of its own: it takes the time that training leaves
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._beat()
            result.set_result(work(self._beat))
        except BaseException as error:  # raised where the result is taken
            result.set_exception(error)

    def _beat(self) -> None:
        if self._is_abandoned:
            raise Abandoned
