"""The samples of a stream, pass after pass over its dataset, and the position in them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import data as torch_data

from determined_ds.errors import CheckpointError, DataError, Problem
from determined_ds.train.data.seeds import mixed_seed, rng_state, seed_everything, set_rng_state
from determined_ds.trial.stream_loader import StreamLoader

CPU = torch.device("cpu")


class Passes:
    """The samples of a dataset, pass after pass.

    Reading uses separate generators, seeded anew for each pass: the dataset draws the same numbers on every replica
    and in every worker, and does not disturb those of training.

    Args:
        loader: The dataset.
        seed: Of the run.
        at_least: Samples that a pass must have.
        endless: Begin again at the end.

    Attributes:
        samples: Samples read in all.
        ended: Number and samples of the first pass that has ended here.
    """

    def __init__(self, loader: StreamLoader, *, seed: int, at_least: int, endless: bool = True) -> None:
        self._loader = loader
        self._seed = seed
        self._at_least = at_least
        self._endless = endless
        self._iterator: Iterator[Any] | None = None
        self._generators: dict[str, Any] = {}
        self._pass, self._of_pass = 0, 0
        self._over = False
        self.samples = 0
        self.ended: tuple[int, int] | None = None

    def take(self, count: int, keep: range) -> tuple[list[Any], int]:
        """Read the next ``count`` samples.

        Returns:
            Those with an index in ``keep``, and how many were read: fewer than ``count`` only at the end of a stream
            that is not endless.
        """
        kept: list[Any] = []
        taken = 0
        with self._reading():
            while taken < count and not self._over:
                before = taken
                for sample in itertools.islice(self._started(), count - taken):
                    if taken in keep:
                        kept.append(sample)
                    taken += 1
                self._of_pass += taken - before
                if taken < count:
                    self._end_pass()
        self.samples += taken
        return kept, taken

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Give the dataset its own generators, and hide the worker processes that it might split by."""
        worker = torch_data._utils.worker
        outer, info = rng_state(CPU), worker._worker_info  # type: ignore[attr-defined]
        set_rng_state(self._generators, CPU)
        worker._worker_info = None  # type: ignore[attr-defined]
        try:
            yield
        finally:
            worker._worker_info = info  # type: ignore[attr-defined]
            self._generators = rng_state(CPU)
            set_rng_state(outer, CPU)

    def _started(self) -> Iterator[Any]:
        if self._iterator is None:
            seed_everything(mixed_seed(self._seed, self._pass), cpu_only=True)
            self._announce_pass()
            self._iterator = self._loader.open()
        return self._iterator

    def _announce_pass(self) -> None:
        if hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(self._pass)

    def _end_pass(self) -> None:
        if self._of_pass < self._at_least:
            raise _too_short(self._loader, self._pass, self._of_pass, self._at_least)
        self.ended = self.ended or (self._pass, self._of_pass)
        self._iterator, self._pass, self._of_pass = None, self._pass + 1, 0
        self._over = not self._endless

    # ------------------------------------------------------------------------------------ the position

    def place(self) -> dict[str, Any]:
        """The position, for :meth:`go_to`; with the dataset's own state where it has one."""
        place: dict[str, Any] = {"samples": self.samples, "pass": self._pass, "of_pass": self._of_pass}
        parts = {"dataset": self._loader.dataset, "iterator": self._iterator}
        if parts["iterator"] is parts["dataset"]:
            del parts["iterator"]
        states = {name: part.state_dict() for name, part in parts.items() if has_state(part)}
        return {**place, "states": states, "generators": self._generators} if states else place

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue from a position: by the dataset's state, or else by reading everything before it."""
        skip = samples_to_skip(self._loader, place)
        if skip != place["samples"]:
            self.samples = place["samples"] - skip
            self._pass, self._of_pass = place["pass"], place["of_pass"] - skip
        if place.get("states"):
            self._load(place["states"])
            self._generators = dict(place["generators"])
        self.take(skip, range(0))

    def _load(self, states: Mapping[str, Any]) -> None:
        with self._reading():
            self._announce_pass()
            if "dataset" in states:
                self._load_part(self._loader.dataset, states["dataset"])
            self._iterator = self._loader.open()
            if "iterator" in states:
                self._load_part(self._iterator, states["iterator"])

    def _load_part(self, part: Any, state: Any) -> None:
        if not has_state(part):
            raise CheckpointError(
                f"the checkpoint holds a state of the training data ({self._loader.name}), and {type(part).__name__} "
                "has no load_state_dict to take it"
            )
        part.load_state_dict(state)


def samples_to_skip(loader: StreamLoader, place: Mapping[str, Any]) -> int:
    """Samples to read and skip to get to a position.

    A dataset with ``set_epoch`` can begin with any pass; without it, a pass may depend on those before.
    """
    if place.get("states"):
        return 0
    return int(place.get("of_pass" if hasattr(loader.dataset, "set_epoch") else "samples", place["samples"]))


def has_state(part: Any) -> bool:
    """Whether something can save its state and load it again."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _too_short(loader: StreamLoader, number: int, have: int, need: int) -> DataError:
    if number and not have:
        message = f"yielded nothing when it was iterated again (pass {number + 1})"
        fix = "make iter() begin anew each time, or give a function that returns a new iterator"
    elif not have:
        message, fix = "is a stream that yields no samples", "check its files and its filter"
    else:
        message = f"is a stream of {have} samples, fewer than the {need} that one batch needs"
        fix = f"use more data, or a smaller global batch: {need} samples are read from it for each"
    return DataError(Problem(key=loader.name, message=message, fix=fix, code="too-little-data"))
