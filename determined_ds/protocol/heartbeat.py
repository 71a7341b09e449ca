"""A rank's sign of life: numbers in a file that the rank and its launcher have in memory. Loads nothing.

Under a launcher that is not ours, the ranks watch one another (``peers.py``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HEARTBEATS = "DET_DS_HEARTBEATS"  # environment variable: the file
# Frames of a stack, innermost first, that are searched for those of a rank that waits for another one.
SHOWN_FRAMES = 6
WAITS = ("/torch/distributed/", "/deepspeed/comm/")


class Beat(NamedTuple):
    """What a rank shows.

    Args:
        steps: Batches trained; 0 before this process has trained one.
        beats: Signs of life; only changes matter.
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
        self._rests = False

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

    def step(self, batches_trained: int) -> None:
        """A batch was trained. The first one begins the watch: before it, data are prepared and models compiled.

        Args:
            batches_trained: Since the start of training, this one included.
        """
        self._steps = batches_trained
        self._write()

    def beat(self) -> None:
        """There is progress between two steps: a micro-batch, a batch of a validation, a part of a checkpoint."""
        if self._steps:
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


def make_heartbeats(path: Path, size: int) -> None:
    """Make the file for so many ranks."""
    path.write_bytes(bytes(SLOT.size * size))


def read_heartbeats(path: Path) -> list[Beat]:
    """What each rank has shown last, by rank."""
    return [Beat(*numbers) for numbers in SLOT.iter_unpack(path.read_bytes())]
