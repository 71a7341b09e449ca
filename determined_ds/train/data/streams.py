"""Data that can only be read from beginning to end: a replica's micro-batches of it, and the position in it.

The stream is read in rows, each one micro-batch of every replica; a batch is ``accumulation`` rows. Every reader (the
rank itself or each of its workers) reads all rows and keeps its own part. So readers need not communicate, between two
batches all of them are at the same position, and a step has the same samples for any number of replicas and workers.
torchdata's ``StatefulDataLoader`` keeps a position for each worker of each replica, which neither of them may change.

What a reader yields first is what it has read first, for the ranks to compare; then come its micro-batches.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils._pytree import tree_leaves

from determined_ds.errors import DataError, Problem
from determined_ds.train.data.loaders import has_state, start_worker, too_little
from determined_ds.train.data.seeds import mixed_seed, rng_state, seed_everything, set_rng_state
from determined_ds.trial.stream_loader import StreamLoader

CPU = torch.device("cpu")


class FirstRow(NamedTuple):
    """What a rank has read first, to compare with the other ranks."""

    name: str
    replica: int
    sharded: bool
    digest: str


class Made(NamedTuple):
    """A micro-batch from a reader, and what it reports beside it."""

    batch: Any
    samples: int  # of this replica; 0 for padding
    place: bytes | None = None  # after the micro-batch, pickled, only between two batches


def takes(loader: StreamLoader, place: Mapping[str, Any]) -> bool:
    """Whether the dataset can begin at a position; otherwise samples are read and skipped up to it."""
    return has_state(loader.dataset) and "state" in place


@dataclass(eq=False)
class ReplicaStream(torch_data.IterableDataset[Any]):
    """The micro-batches of one replica; iterated in the rank itself or in each of its workers.

    Reading uses separate generators, seeded anew for each pass: the dataset draws the same numbers on every replica
    and in every worker, and does not disturb those of training.
    """

    loader: StreamLoader
    seed: int
    replica: int
    replicas: int
    accumulation: int = 1  # rows of a batch
    start_batch: int | None = None  # None: the stream is read to its end, once
    place: Mapping[str, Any] = field(default_factory=dict)  # of the first sample

    def __iter__(self) -> Iterator[FirstRow | Made]:
        info, loader, size = torch_data.get_worker_info(), self.loader, self.loader.batch_size
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        replica, replicas = (0, 1) if loader.sharded else (self.replica, self.replicas)
        trains, accumulation, row = self.start_batch is not None, self.accumulation, size * replicas
        mine = range(replica * size, (replica + 1) * size)  # of a row
        start = (self.start_batch or 0) * accumulation
        begins: dict[str, Any] = {"samples": 0, "pass": 0, "of_pass": 0}
        self._at = dict(self.place) if takes(loader, self.place) else begins
        self._generators: dict[str, Any] = {}
        self._samples = self._passes(row * accumulation if trains else 1, endless=trains)
        self._take(self.place.get("samples", 0) - self._at["samples"], range(0))
        everything, taken = self._take(row, range(row))
        yield FirstRow(loader.name, self.replica, loader.sharded, digest(everything))
        own, padding = everything[mine.start : mine.stop], everything[:size]
        for index in itertools.count(start):
            is_mine = (index - start) % workers == worker
            if index > start:
                own, taken = self._take(row, mine if is_mine else range(0))
                padding = []
            if not taken or (is_mine and not own and not padding):
                return
            if is_mine:
                if info is not None:
                    seed_everything(mixed_seed(self.seed, self.replica, index))
                place = None
                if trains and (index + 1) % accumulation == 0:
                    if has_state(loader.dataset):
                        self._at |= {"state": loader.dataset.state_dict(), "generators": self._generators}
                    # As bytes: each tensor that a worker sends costs a file descriptor, and the dataset goes on to
                    # change its state.
                    place = pickle.dumps(self._at)
                yield Made(loader.collate_fn(own or padding), len(own), place)

    def _take(self, count: int, keep: range) -> tuple[list[Any], int]:
        """Of the next ``count`` samples those with an index in ``keep``, and how many there were before the end."""
        worker: Any = torch_data._utils.worker
        outer, info, taken, kept = rng_state(CPU), worker._worker_info, 0, []
        set_rng_state(self._generators, CPU)
        worker._worker_info = None  # the dataset would split by the worker processes
        try:
            for taken, sample in enumerate(itertools.islice(self._samples, count), start=1):
                if taken - 1 in keep:
                    kept.append(sample)
        finally:
            worker._worker_info = info
            self._generators = rng_state(CPU)
            set_rng_state(outer, CPU)
        self._at["samples"] += taken
        return kept, taken

    def _passes(self, at_least: int, *, endless: bool) -> Iterator[Any]:
        """All samples from the position on, pass after pass."""
        loader, at = self.loader, self._at
        if is_begun := "state" in at:
            loader.dataset.load_state_dict(at["state"])
            set_rng_state(at["generators"], CPU)
        while endless or not at["pass"]:
            if not is_begun:
                seed_everything(mixed_seed(self.seed, at["pass"]), cpu_only=True)
            is_begun = False
            if hasattr(loader.dataset, "set_epoch"):
                loader.dataset.set_epoch(at["pass"])
            for sample in loader.open():
                at["of_pass"] += 1
                yield sample
            if at["of_pass"] < at_least:
                again = "make iter() begin anew each time, or give a function that returns a new iterator"
                fix = again if at["pass"] else "use more data, or a smaller global batch"
                said = f"yielded {at['of_pass']} samples in pass {at['pass'] + 1}, and one batch needs {at_least}"
                raise too_little(loader.name, said, fix)
            at["pass"], at["of_pass"] = at["pass"] + 1, 0

    def reader(self, seed: int) -> torch_data.DataLoader[Any]:
        """torch's loader around it; it runs the workers."""
        options: dict[str, Any] = {**self.loader.workers, "generator": torch.Generator().manual_seed(seed)}
        options["worker_init_fn"] = functools.partial(start_worker, self.loader.worker_init_fn)
        return torch_data.DataLoader(self, batch_size=None, collate_fn=_unchanged, **options)


def _unchanged(made: Any) -> Any:
    return made


def read(reader: torch_data.DataLoader[Any]) -> tuple[FirstRow, Iterator[Made]]:
    """Begin to read. Returns what is read first, and the micro-batches."""
    made = iter(reader)
    first, *_ = [next(made) for _ in range(max(1, reader.num_workers))]  # each worker begins with it
    return first, made


def check_first_rows(rows: list[FirstRow | None], note: Callable[[str], None]) -> None:
    """Compare what the ranks have read first: the same of a stream, something else on each replica of a sharded one."""
    found = [row for row in rows if row is not None]
    if len({row.replica for row in found}) < 2:
        return
    name, are_same = found[0].name, len({row.digest for row in found}) == 1
    if found[0].sharded and are_same:
        note(f"warning: {name} is sharded=True, and its first samples are the same on every replica")
    elif not found[0].sharded and not are_same:
        message = "yields other samples on one replica than on another: some would count twice, others never"
        fix = "sharded=True where it yields each replica its own samples; otherwise read its files in one order, and "
        fix += "draw from random, numpy or torch, or from a generator with a fixed seed"
        raise DataError(Problem(key=name, message=message, fix=fix, code="stream-differs"))


def digest(samples: list[Any]) -> str:
    """The same for the same samples in every process; objects that are not plain values count by their type."""
    found = hashlib.sha1(usedforsecurity=False)
    for value in tree_leaves(samples):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            value = value.detach().cpu().double().numpy()
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            value = value.tobytes()
        is_plain = isinstance(value, (str, bytes, int, float, complex))
        found.update(repr(value if is_plain else type(value).__qualname__).encode())
    return found.hexdigest()
