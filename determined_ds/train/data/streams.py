"""A replica's micro-batches from a stream: the same samples in a step for any number of replicas and workers.

The stream is read in rows, each one micro-batch of every replica; a batch is ``accumulation`` rows. Every reader (the
rank itself or each of its workers) reads all rows and keeps its own part. So readers need not communicate, and between
two batches all of them are at the same position.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import data as torch_data

from determined_ds.errors import CheckpointError, DataError, Problem
from determined_ds.train.data.passes import Passes
from determined_ds.train.data.seeds import mixed_seed, seed_everything, start_worker
from determined_ds.train.warning_keeper import warned
from determined_ds.trial.stream_loader import StreamLoader


@dataclass(frozen=True, kw_only=True)
class News:
    """What a reader reports beside a micro-batch.

    Args:
        first: Digest of the first row that it read; None with other rows.
        ended: Number and samples of the first pass that has ended.
        place: The position after the micro-batch, pickled; only between two batches.
    """

    first: str | None = None
    ended: tuple[int, int] | None = None
    place: bytes | None = None


class Made(NamedTuple):
    """A micro-batch from a reader."""

    batch: Any
    samples: int  # of this replica; 0: padding only
    news: News


class ReplicaStream(torch_data.IterableDataset[Made]):
    """The micro-batches of one replica; iterated in the rank itself or in each of its workers.

    Args:
        loader: The stream.
        batch_size: Samples in a micro-batch.
        replica: Data-parallel rank.
        replicas: Data-parallel copies.
        seed: Of the run.
        accumulation: Rows in a batch.
        start_batch: The batch to begin with; None for one pass of validation.
        place: The position of that batch in the stream.
    """

    def __init__(
        self,
        loader: StreamLoader,
        *,
        batch_size: int,
        replica: int,
        replicas: int,
        seed: int,
        accumulation: int = 1,
        start_batch: int | None = None,
        place: Mapping[str, Any] | None = None,
    ) -> None:
        self._loader = loader
        self._size = batch_size
        self._seeds = (seed, replica)
        replica, replicas = (0, 1) if loader.sharded else (replica, replicas)
        self._row = batch_size * replicas
        self._own = range(replica * batch_size, (replica + 1) * batch_size)
        self._accumulation = accumulation
        self._trains = start_batch is not None
        self._start = (start_batch or 0) * accumulation
        self._place = place
        self._ahead: tuple[list[Any], int, str] | None = None
        at_least = self._row * accumulation if self._trains else 1
        self._new = functools.partial(Passes, loader, seed=seed, at_least=at_least, endless=self._trains)
        self.passes = self._new()

    def peek(self) -> str:
        """Read the first row ahead of the rest, in the process that iterates. Returns its digest."""
        self._open()
        self._ahead = self._first_row()
        return self._ahead[2]

    def first_row(self, digest: str | None) -> FirstRow | None:
        """What this rank has read first, given its digest."""
        if digest is None:
            return None
        loader = self._loader
        return FirstRow(name=loader.name, replica=self._seeds[1], sharded=loader.sharded, digest=digest)

    def _open(self) -> None:
        self.passes = self._new()
        if self._place:
            self.passes.go_to(self._place)

    def _first_row(self) -> tuple[list[Any], int, str]:
        """The samples of this replica, or others where it has none; how many are its own; and the row's digest."""
        row, _ = self.passes.take(self._row, range(self._row))
        own = row[self._own.start : self._own.stop]
        return own or row[: self._size], len(own), digest(row)

    def __iter__(self) -> Iterator[Made]:
        info = torch_data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        if self._ahead is None:
            self._open()
        for number in itertools.count(self._start):
            mine = (number - self._start) % workers == worker
            first = None
            if number == self._start:
                samples, own, first = self._ahead or self._first_row()
                self._ahead = None
            else:
                samples, taken = self.passes.take(self._row, self._own if mine else range(0))
                own = len(samples)
                if not taken or (mine and not own):
                    return
            if not mine:
                continue
            place = None
            if info is not None:
                seed_everything(mixed_seed(*self._seeds, number))
                # Without workers, the position is asked for when it is needed.
                if self._trains and (number + 1) % self._accumulation == 0:
                    place = _pickled(self.passes, self._loader.name)
            news = News(first=first, ended=self.passes.ended, place=place)
            yield Made(self._loader.collate_fn(samples), own, news)


def _pickled(passes: Passes, name: str) -> bytes:
    """As bytes: each tensor that a worker sends costs a file descriptor."""
    place = passes.place()
    try:
        return pickle.dumps(place)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise CheckpointError(
            f"the state_dict of {name} cannot be saved: {error}; return tensors, numbers, strings, lists and dicts"
        ) from error


def torch_loader(loader: StreamLoader, stream: ReplicaStream, seed: int) -> torch_data.DataLoader[Made]:
    """torch's loader around a replica's part; it runs the workers."""
    init = functools.partial(start_worker, loader.worker_init_fn) if loader.num_workers else None
    return torch_data.DataLoader(
        stream,
        batch_size=None,
        collate_fn=_unchanged,  # type: ignore[arg-type]
        worker_init_fn=init,
        generator=torch.Generator().manual_seed(seed),
        **loader.workers,  # type: ignore[arg-type]
    )


def _unchanged(made: Made) -> Made:
    return made


class TrainingStream:
    """The endless micro-batches that a rank trains on, and the position in them.

    Attributes:
        first: What this rank has read first, for :func:`check_first_rows`.
    """

    def __init__(
        self,
        loader: StreamLoader,
        stream: ReplicaStream,
        *,
        place: Mapping[str, Any],
        seed: int,
        note: Callable[[str], None],
    ) -> None:
        self._loader = loader
        self._stream = stream
        self._place = dict(place)
        self._note = note
        self._taken = False
        self._has_noted = False
        self._ahead: Made | None = None
        if loader.num_workers:
            self._made = iter(torch_loader(loader, stream, seed))
            self._ahead = next(self._made)
            self.first = stream.first_row(self._ahead.news.first)
        else:  # samples are read, but collate_fn runs, and draws random numbers, only when training takes them
            self.first = stream.first_row(stream.peek())
            self._made = iter(torch_loader(loader, stream, seed))

    def __iter__(self) -> TrainingStream:
        return self

    def __next__(self) -> Any:
        batch, _, news = self._ahead or next(self._made)
        self._ahead, self._taken = None, True
        if news.place is not None:
            self._place = pickle.loads(news.place)
        if news.ended and not self._has_noted:
            self._has_noted = True
            self._note_end(*news.ended)
        return batch

    def _note_end(self, number: int, samples: int) -> None:
        length = self._loader.length()
        if length is None:
            self._note(f"data        {self._loader.name} ended after {samples:,} samples, and begins again")
        elif length != samples:
            text = (
                f"warning: {self._loader.name} yielded {samples:,} samples in pass {number + 1}, and its len() is "
                f"{length:,}: epochs are counted by len()"
            )
            self._note(warned(text))

    @property
    def apart(self) -> tuple[str, bool] | None:
        """The stream's name where each replica reads its own samples."""
        return (self._loader.name, False) if self._loader.sharded else None

    def state_dict(self) -> dict[str, Any]:
        """The position after what training has taken."""
        if self._loader.num_workers or not self._taken:
            return self._place
        return self._stream.passes.place()


# ------------------------------------------------------------------------- whether replicas read the same


@dataclass(frozen=True, kw_only=True)
class FirstRow:
    """What a rank has read first, to compare with the other ranks.

    Args:
        name: Of the dataset.
        replica: Data-parallel rank.
        sharded: Whether each replica should read different samples.
        digest: Of the samples.
    """

    name: str
    replica: int
    sharded: bool
    digest: str


def check_first_rows(rows: list[FirstRow | None], note: Callable[[str], None]) -> None:
    """Compare what the ranks have read first: the same of a stream, something else on each replica of a sharded one.

    Args:
        rows: Of each rank; None where it reads no stream.
        note: Shows a line to the user.

    Raises:
        DataError: replicas read different samples.
    """
    found = [row for row in rows if row is not None]
    digests, replicas = {row.digest for row in found}, {row.replica for row in found}
    if len(replicas) < 2:
        return
    if found[0].sharded and len(digests) == 1:
        text = (
            f"warning: {found[0].name} is sharded=True, and its first samples are the same on every replica"
        )
        note(warned(text))
    elif not found[0].sharded and len(digests) > 1:
        message = (
            "yields other samples on one replica than on another, so that parts of it would be trained twice and "
            "others never"
        )
        fix = (
            "sharded=True where it yields each replica its own samples; otherwise read its files in one order, and "
            "draw from random, numpy or torch, or from a generator with a fixed seed"
        )
        raise DataError(Problem(key=found[0].name, message=message, fix=fix, code="stream-differs"))


def digest(samples: list[Any]) -> str:
    """The same for the same samples in every process; objects that are not plain values count by their type."""
    found = hashlib.sha1(usedforsecurity=False)
    for mark in _marks(samples):
        found.update(mark)
    return found.hexdigest()


def _marks(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type == "cpu":
        value = value.detach().contiguous()
        yield repr((tuple(value.shape), value.dtype)).encode()
        yield value.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        yield repr((value.shape, str(value.dtype))).encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield from _marks([part for item in value.items() for part in item])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _marks(item)
    elif isinstance(value, (str, bytes, int, float, complex, bool)) or value is None:
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()
