"""A rank's sign of life: numbers in a file that the rank and its launcher have in memory. Loads nothing.

Under a launcher that is not ours, the ranks watch one another (``peers.py``). They are watched from the moment that
they have joined. Until its first batch a rank prepares data, builds or compiles a model, which may take any time: a
thread shows whether the process does anything, see :meth:`Heartbeat.begin`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEARTBEATS = "DET_DS_HEARTBEATS"  # environment variable: the file
# Frames of a stack, innermost first, that are searched for those of a rank that waits for another one.
SHOWN_FRAMES = 6
WAITS = ("/torch/distributed/", "/deepspeed/comm/")
# What a process does at least, of its own or by its children, that downloads, reads or computes.
LEAST_CPU, LEAST_IO_BYTES = 0.01, 2**20  # a second of time, in each interval
# A rank that computes in one call for longer than so many timeouts hangs all the same: NCCL waits by computing.
LONGEST_CALL = 6


class Beat(NamedTuple):
    """What a rank shows.

    Args:
        steps: Batches trained; 0 before this process has trained one.
        beats: Signs of life; only changes matter. 0 before it has joined the others.
        patient: Above 0 where it may take any time.
    """

    steps: int
    beats: int
    patient: int


SLOT = struct.Struct("=QQQ")  # a Beat


class Heartbeat:
    """The sign of life of this process."""

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None
        self._at = 0
        self._steps = self._beats = self._patient = 0
        self._rests = self._begun = False

    @property
    def state(self) -> tuple[int, int, int, bool]:
        """Batches trained, signs of progress, whether it may take any time, whether training is over."""
        return self._steps, self._beats, self._patient, self._rests

    def listen_for_questions(self, log: Path) -> None:
        """From now on the launcher may read, and may request this process's stacks by SIGUSR1.

        Args:
            log: Where the stacks are appended.
        """
        path = os.environ.get(HEARTBEATS)
        if path is None:
            return
        with open(path, "r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        self._at = int(os.environ["RANK"]) * SLOT.size
        self._log = log.open("ab")  # it has to stay open
        faulthandler.register(signal.SIGUSR1, file=self._log, all_threads=True)

    def begin(self, timeout_s: float) -> None:
        """The ranks have joined, and are watched from now on.

        Until the first batch, what this process does counts as progress: Python code that moves on, or a call that
        computes, reads or writes, in this process or in its children, such as compilers. A call into a collective that
        computes does not count, and none counts for ever.

        Args:
            timeout_s: How long none of the ranks may make progress; 0: they are not watched.
        """
        if timeout_s and not self._begun:
            self._begun = True
            self._write()
            threading.Thread(target=self._show_life, args=(timeout_s,), name="starting", daemon=True).start()

    def _show_life(self, timeout_s: float) -> None:
        every_s, counts_every_s = min(1.0, timeout_s / 20), min(10.0, timeout_s / 6)
        stack: list[tuple[str, int]] = []
        moved_s = counted_s = time.monotonic()
        done = _work_done()
        while not self._steps and not self._rests:
            time.sleep(every_s)
            now_s, found = time.monotonic(), _main_stack()
            if found != stack:
                stack, moved_s = found, now_s
                self._write()
            if now_s - counted_s >= counts_every_s:
                before, done = done, _work_done()
                works = True  # where the system does not say
                if before is not None and done is not None:
                    cpu_s, io_bytes = done[0] - before[0], done[1] - before[1]
                    works = cpu_s >= LEAST_CPU * (now_s - counted_s) or io_bytes >= LEAST_IO_BYTES
                counted_s = now_s
                waits = any(word in file for file, _ in stack[:SHOWN_FRAMES] for word in WAITS)
                if works and not waits and now_s - moved_s < LONGEST_CALL * timeout_s:
                    self._write()

    def step(self, batches_trained: int) -> None:
        """A batch was trained.

        Args:
            batches_trained: Since the start of training, this one included.
        """
        self._steps = batches_trained
        self._write()

    def beat(self) -> None:
        """There is progress between two steps: a micro-batch, a batch of a validation, a part of a checkpoint."""
        if self._steps or self._begun:
            self._write()

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """The user's code runs in here, and may take any time."""
        self._patient += 1
        self._write()
        try:
            yield
        finally:
            self._patient -= 1
            self._write()

    def rest(self) -> None:
        """Training is over: whatever follows may take any time."""
        self._patient += 1
        self._rests = True
        self._write()

    def _write(self) -> None:
        self._beats += 1
        if self._page is not None:
            SLOT.pack_into(self._page, self._at, self._steps, self._beats, self._patient)


HEART = Heartbeat()


def _main_stack() -> list[tuple[str, int]]:
    """Where the main thread is: file and instruction of each frame, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lasti))
        frame = frame.f_back
    return found


def _work_done() -> tuple[float, int] | None:
    """Seconds of processors that this process and its children have taken, and bytes that they read and wrote.

    None where the system does not say.
    """
    import psutil

    seconds, num_bytes = 0.0, 0
    try:
        process = psutil.Process()
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(
                psutil.Error, AttributeError
            ):  # it has ended; or there are no such counters
                times = each.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
                counters = each.io_counters()
                num_bytes += counters.read_chars + counters.write_chars
    except (psutil.Error, OSError):
        return None
    return seconds, num_bytes


def make_heartbeats(path: Path, size: int) -> None:
    """Make the file for so many ranks."""
    path.write_bytes(bytes(SLOT.size * size))


def read_heartbeats(path: Path) -> list[Beat]:
    """What each rank has shown last, by rank."""
    return [Beat(*numbers) for numbers in SLOT.iter_unpack(path.read_bytes())]
