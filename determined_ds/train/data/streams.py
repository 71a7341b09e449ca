"""Data that can only be read from beginning to end: a replica's micro-batches of it, and the position in it.

The stream is read in rows, each one micro-batch of every replica; a batch is ``accumulation`` rows. Every reader (the
rank itself or each of its workers) reads all rows and keeps its own part. So readers need not communicate, between two
batches all of them are at the same position, and a step has the same samples for any number of replicas and workers.
torchdata's ``StatefulDataLoader`` keeps a position for each worker of each replica, which neither of them may change.

What a reader yields first is what it has read first, for the ranks to compare; then come its micro-batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils._pytree import tree_leaves

from determined_ds.config.layout import Batch
from determined_ds.errors import CheckpointError, DataError, Problem
from determined_ds.train.data.loaders import has_state, worker_start
from determined_ds.train.data.seeds import mixed_seed, rng_state, seed_everything, set_rng_state
from determined_ds.trial.stream_loader import StreamLoader

CPU = torch.device("cpu")
MANY_READERS = 8  # of a whole stream, from which on a warning says how many there are


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


class Passes:
    """The samples of a dataset, pass after pass.

    Reading uses separate generators, seeded anew for each pass: the dataset draws the same numbers on every replica
    and in every worker, and does not disturb those of training.
    """

    def __init__(self, loader: StreamLoader, *, seed: int, at_least: int, endless: bool) -> None:
        self._loader, self._seed, self._at_least, self._endless = loader, seed, at_least, endless
        self._iterator: Iterator[Any] | None = None  # of the pass at hand
        self._samples, self._pass, self._of_pass = 0, 0, 0
        self._generators: dict[str, Any] = {}
        self._stream = self._read()

    def take(self, count: int, keep: range) -> tuple[list[Any], int]:
        """Of the next ``count`` samples those with an index in ``keep``, and how many there were before the end."""
        taken, kept = 0, []
        with self._reading():
            for taken, sample in enumerate(itertools.islice(self._stream, count), start=1):
                if taken - 1 in keep:
                    kept.append(sample)
        self._samples += taken
        return kept, taken

    def _read(self) -> Iterator[Any]:
        """All samples, pass after pass; to be iterated in :meth:`_reading`."""
        while self._endless or not self._pass:
            if self._iterator is None:
                seed_everything(mixed_seed(self._seed, self._pass), cpu_only=True)
            for sample in self._open() if self._iterator is None else self._iterator:
                self._of_pass += 1
                yield sample
            have, need = self._of_pass, self._at_least
            if have < need:
                message = f"yielded {have} samples in pass {self._pass + 1}, and one batch needs {need}"
                fix = "use more data, or a smaller global batch"
                if self._pass:
                    fix = "make iter() begin anew each time, or give a function that returns a new iterator"
                key, code = self._loader.name, "too-little-data"
                raise DataError(Problem(key=key, message=message, fix=fix, code=code))
            self._iterator, self._pass, self._of_pass = None, self._pass + 1, 0

    def _open(self) -> Iterator[Any]:
        if hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(self._pass)
        self._iterator = self._loader.open()
        return self._iterator

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Give the dataset its own generators, and hide the worker processes that it might split by."""
        worker: Any = torch_data._utils.worker
        outer, info = rng_state(CPU), worker._worker_info
        set_rng_state(self._generators, CPU)
        worker._worker_info = None
        try:
            yield
        finally:
            worker._worker_info = info
            self._generators = rng_state(CPU)
            set_rng_state(outer, CPU)

    def place(self) -> bytes:
        """The position, for :meth:`go_to`, with the dataset's own state where it has one.

        As bytes: each tensor that a worker sends costs a file descriptor, and the dataset goes on to change its state.
        """
        place: dict[str, Any] = {"samples": self._samples, "pass": self._pass, "of_pass": self._of_pass}
        parts = {"dataset": self._loader.dataset}
        if self._iterator is not self._loader.dataset:
            parts["iterator"] = self._iterator
        if states := {name: part.state_dict() for name, part in parts.items() if has_state(part)}:
            place |= {"states": states, "generators": self._generators}
        try:
            return pickle.dumps(place)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise CheckpointError(
                f"the state_dict of {self._loader.name} cannot be saved: {error}; return tensors, numbers, strings, "
                "lists and dicts"
            ) from error

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue from a position: by the dataset's state, or else by reading everything before it."""
        skip = samples_to_skip(self._loader, place)
        if skip != place["samples"]:
            self._samples = place["samples"] - skip
            self._pass, self._of_pass = place["pass"], place["of_pass"] - skip
        if states := place.get("states"):
            with self._reading():
                for name, find in {"dataset": lambda: self._loader.dataset, "iterator": self._open}.items():
                    part: Any = find()
                    if name not in states:
                        continue
                    if not has_state(part):
                        raise CheckpointError(
                            f"the checkpoint holds a state of the training data ({self._loader.name}), and "
                            f"{type(part).__name__} has no load_state_dict to take it"
                        )
                    part.load_state_dict(states[name])
            self._generators = dict(place["generators"])
        self.take(skip, range(0))


def samples_to_skip(loader: StreamLoader, place: Mapping[str, Any]) -> int:
    """Samples to read and skip to get to a position.

    A dataset with ``set_epoch`` can begin with any pass; without it, a pass may depend on those before.
    """
    if place.get("states"):
        return 0
    return int(place.get("of_pass" if hasattr(loader.dataset, "set_epoch") else "samples", place["samples"]))


@dataclass(kw_only=True, eq=False)
class ReplicaStream(torch_data.IterableDataset[Any]):
    """The micro-batches of one replica; iterated in the rank itself or in each of its workers."""

    loader: StreamLoader
    batch: Batch
    replica: int
    seed: int
    start_batch: int | None = None  # None: the stream is read to its end, once
    place: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[FirstRow | Made]:
        info, loader, size = torch_data.get_worker_info(), self.loader, self.batch.micro_batch_size
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        replica, replicas = (0, 1) if loader.sharded else (self.replica, self.batch.replicas)
        mine = range(replica * size, (replica + 1) * size)  # of a row
        trains, accumulation, row = self.start_batch is not None, self.batch.accumulation, size * replicas
        start, at_least = (self.start_batch or 0) * accumulation, row * accumulation if trains else 1
        passes = Passes(loader, seed=self.seed, at_least=at_least, endless=trains)
        if self.place:
            passes.go_to(self.place)
        everything, taken = passes.take(row, range(row))
        yield FirstRow(loader.name, self.replica, loader.sharded, digest(everything))
        own, padding = everything[mine.start : mine.stop], everything[:size]
        for index in itertools.count(start):
            is_mine = (index - start) % workers == worker
            if index > start:
                own, taken = passes.take(row, mine if is_mine else range(0))
                padding = []
            if not taken or (is_mine and not own and not padding):
                return
            if is_mine:
                if info is not None:
                    seed_everything(mixed_seed(self.seed, self.replica, index))
                place = passes.place() if trains and (index + 1) % accumulation == 0 else None
                yield Made(loader.collate_fn(own or padding), len(own), place)

    def reader(self, seed: int) -> torch_data.DataLoader[Any]:
        """torch's loader around it; it runs the workers."""
        options: dict[str, Any] = {**self.loader.workers, "worker_init_fn": worker_start(self.loader)}
        options["generator"] = torch.Generator().manual_seed(seed)
        return torch_data.DataLoader(self, batch_size=None, collate_fn=_unchanged, **options)


def _unchanged(made: Any) -> Any:
    return made


def read(reader: torch_data.DataLoader[Any]) -> tuple[FirstRow, Iterator[Made]]:
    """Begin to read. Returns what is read first, and the micro-batches."""
    made = iter(reader)
    first, *_ = [next(made) for _ in range(max(1, reader.num_workers))]  # each worker begins with it
    return first, made


class TrainingStream:
    """The endless micro-batches that a replica trains on, and the position in them.

    Args:
        stream: With where it starts.
        note: Shows a line.
    """

    def __init__(self, stream: ReplicaStream, note: Callable[[str], None]) -> None:
        loader, place, start = stream.loader, dict(stream.place or {}), stream.start_batch or 0
        if skip := samples_to_skip(loader, place):
            skips = f"has no state_dict: reading and skipping {skip:,} samples, to resume after batch {start}"
            note(f"data        {loader.name} {skips}")
        readers = max(1, loader.num_workers) * (1 if loader.sharded else stream.batch.replicas)
        if readers >= MANY_READERS:
            note(
                f"warning: every sample of {loader.name} is read {readers} times, by each worker of each replica\n"
                "  fix: give each replica a part (dataset.shard, or its files) with sharded=True; or use fewer "
                "workers, and do the work on a sample in collate_fn, which sees only those that are kept"
            )
        self._place = pickle.dumps(place)
        self.apart = (loader.name, False) if loader.sharded else None
        # Without workers, collate_fn runs, and draws random numbers, only when training takes what it makes.
        self.first, self._made = read(stream.reader(stream.seed + start))

    def __iter__(self) -> TrainingStream:
        return self

    def __next__(self) -> Any:
        made = next(self._made)
        self._place = made.place or self._place
        return made.batch

    def state_dict(self) -> dict[str, Any]:
        """The position after what training has taken."""
        return dict(pickle.loads(self._place))


def check_first_rows(rows: list[FirstRow | None], note: Callable[[str], None]) -> None:
    """Compare what the ranks have read first: the same of a stream, something else on each replica of a sharded one."""
    found = [row for row in rows if row is not None]
    if len({row.replica for row in found}) < 2:
        return
    name, is_sharded, are_same = found[0].name, found[0].sharded, len({row.digest for row in found}) == 1
    if is_sharded and are_same:
        note(f"warning: {name} is sharded=True, and its first samples are the same on every replica")
    elif not is_sharded and not are_same:
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
            found.update(f"{value.shape} {value.dtype}".encode() + value.tobytes())
        elif isinstance(value, (str, bytes, int, float, complex, type(None))):
            found.update(repr(value).encode())
        else:
            found.update(type(value).__qualname__.encode())
    return found.hexdigest()
