"""A rank's sign of life: for a launcher of ours, numbers in a file that both have in memory. Loads nothing.

A beat is a few bytes written to memory. Under a launcher that is not ours, the ranks watch one another (``peers.py``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HEARTBEATS = "DET_DS_HEARTBEATS"  # environment variable: the file
# Of each rank: steps passed, signs of life, and whether it may take any time now.
SLOT = struct.Struct("=QQQ")
# Of a rank's stack, the innermost frames are looked at; these are of ranks that wait for another one.
SHOWN_FRAMES = 6
WAITS = ("/torch/distributed/", "/deepspeed/comm/")


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
        """Begin: from now on the launcher may look, and may ask by SIGUSR1 for this process's stacks.

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
        """What is done in here is the user's, and takes as long as it takes."""
        self._patient += 1
        self._write()
        try:
            yield
        finally:
            self._patient -= 1
            self._write()

    def rest(self) -> None:
        """Training is over: whatever comes now may take its time."""
        self._patient += 1
        self._rests = True
        self._write()

    def _write(self) -> None:
        self._beats += 1
        if self._page is not None:
            SLOT.pack_into(self._page, self._at, self._steps, self._beats, self._patient)


HEART = Heartbeat()


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What a rank has shown last.

    Args:
        steps: Batches trained; 0 before this process has trained one.
        beats: Signs of life; of no meaning but that they change.
        patient: Whether it may take any time.
    """

    steps: int
    beats: int
    patient: bool


def make_heartbeats(path: Path, size: int) -> None:
    """Make the file for so many ranks."""
    path.write_bytes(bytes(SLOT.size * size))


def read_heartbeats(path: Path) -> list[Sign]:
    """What each rank has shown, by rank."""
    return [
        Sign(steps=steps, beats=beats, patient=bool(patient))
        for steps, beats, patient in SLOT.iter_unpack(path.read_bytes())
    ]
