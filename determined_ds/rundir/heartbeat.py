"""A rank's signs of progress, which the watch over the ranks compares (``train/group/watch.py``). Loads nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Heartbeat:
    """The signs of progress of this process.

    Attributes:
        steps: Batches trained; 0 before this process has trained one.
        beats: Signs of progress; only changes matter. 0 before this rank has joined the others.
        patient: Above 0 where it may take any time.
        rests: Whether training is over.
    """

    def __init__(self) -> None:
        self.steps = self.beats = self.patient = 0
        self.rests = False

    def begin(self) -> None:
        """The ranks have joined: from now on, one that shows no progress hangs."""
        self.beats += 1

    def step(self, batches_trained: int) -> None:
        """A batch was trained; so many have been since the start of training, this one included."""
        self.steps = batches_trained
        self.beats += 1

    def beat(self) -> None:
        """There is progress between two steps: a micro-batch, a batch of a validation, a part of a checkpoint."""
        if self.beats:
            self.beats += 1

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """The user's code runs in here, or a master is asked: it may take any time."""
        self.patient += 1
        try:
            yield
        finally:
            self.patient -= 1
            self.beat()

    def rest(self) -> None:
        """Training is over: whatever follows may take any time."""
        self.patient += 1
        self.rests = True


HEART = Heartbeat()
