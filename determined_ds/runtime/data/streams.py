"""A replica's micro-batches out of a stream: the same samples in a step whatever the replicas and the workers.

The stream is read in rows, each one micro-batch of every replica; a batch is ``accumulation`` rows. Every reader, the
rank itself or each of its workers, reads all rows and keeps what is its own. So no two of them have to agree, and
between two batches the place in the stream is one for all.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import data as torch_data

from determined_ds.errors import CheckpointError
from determined_ds.runtime.data.first_rows import FirstRow, digest
from determined_ds.runtime.data.generators import seed_everything
from determined_ds.runtime.data.passes import Passes
from determined_ds.runtime.data.worker_seeds import start_worker
from determined_ds.trial.stream_loader import StreamLoader


@dataclass(frozen=True, kw_only=True)
class News:
    """What a reader tells beside a micro-batch.

    Args:
        first: Digest of the first row that it read; None with other rows.
        ended: The first pass that has ended, and its samples.
        place: After the micro-batch, pickled; only between two batches.
    """

    first: str | None = None
    ended: tuple[int, int] | None = None
    place: bytes | None = None


class Made(NamedTuple):
    """A micro-batch, as it comes out of a reader."""

    batch: Any
    samples: int  # of this replica; 0: for padding only
    news: News


class ReplicaStream(torch_data.IterableDataset[Made]):
    """The micro-batches of one replica; iterated in the rank itself or in each of its workers.

    Args:
        loader: The stream.
        batch_size: Samples in a micro-batch.
        replica: Data-parallel rank.
        replicas: Data-parallel copies.
        seed: The run's.
        accumulation: Rows in a batch.
        start_batch: The batch to begin with; None for one pass of validation.
        place: Where that is in the stream.
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
        """Read the first row, ahead of the rest, and give its digest; in the process that iterates."""
        self._open()
        self._ahead = self._first_row()
        return self._ahead[2]

    def first_row(self, digest: str | None) -> FirstRow | None:
        """What this rank has read first, by the digest of it."""
        name, replica, sharded = self._loader.name, self._seeds[1], self._loader.sharded
        if digest is None:
            return None
        return FirstRow(name=name, replica=replica, sharded=sharded, digest=digest)

    def _open(self) -> None:
        self.passes = self._new()
        if self._place:
            self.passes.go_to(self._place)

    def _first_row(self) -> tuple[list[Any], int, str]:
        """The samples of this replica, or others where it has none, how many are its own, and the row's digest."""
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
            if info is not None:
                seed_everything(hash((*self._seeds, number)) % 2**32)
            # Without workers the place is asked for when it is needed.
            ends_batch = (number + 1) % self._accumulation == 0
            place = (
                _pickled(self.passes, self._loader.name)
                if info is not None and self._trains and ends_batch
                else None
            )
            news = News(first=first, ended=self.passes.ended, place=place)
            yield Made(self._loader.collate_fn(samples), own, news)


def _pickled(passes: Passes, name: str) -> bytes:
    """As bytes, since tensors that are sent by a worker cost a file descriptor each."""
    place = passes.place()
    try:
        return pickle.dumps(place)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise CheckpointError(
            f"the state_dict of {name} cannot be saved: {error}; return tensors, numbers, strings, lists and dicts"
        ) from error


def torch_loader(loader: StreamLoader, stream: ReplicaStream, seed: int) -> torch_data.DataLoader[Made]:
    """Torch's loader around a replica's part: it runs the workers."""
    init = functools.partial(start_worker, loader.worker_init_fn) if loader.num_workers else None
    return torch_data.DataLoader(
        stream,
        batch_size=None,
        collate_fn=_as_it_is,  # type: ignore[arg-type]
        worker_init_fn=init,
        generator=torch.Generator().manual_seed(seed),
        **loader.workers,  # type: ignore[arg-type]
    )


def _as_it_is(made: Made) -> Made:
    return made


# ------------------------------------------------------------------------------------------- training


class TrainingStream:
    """What a rank trains on: an endless iterator, that knows where it is.

    Args:
        loader: The stream.
        stream: The replica's part of it.
        place: Where it begins.
        seed: The run's.
        note: Says something to the user.

    Attributes:
        first: What it read first, for :func:`check_first_rows`.
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
        self._said = False
        self._ahead: Made | None = None
        if loader.num_workers:
            self._made = iter(torch_loader(loader, stream, seed))
            self._ahead = next(self._made)
            self.first = stream.first_row(self._ahead.news.first)
        else:  # samples are read, but what collate_fn draws is drawn when training is there
            self.first = stream.first_row(stream.peek())
            self._made = iter(torch_loader(loader, stream, seed))

    def __iter__(self) -> TrainingStream:
        return self

    def __next__(self) -> Any:
        batch, _, news = self._ahead or next(self._made)
        self._ahead, self._taken = None, True
        if news.place is not None:
            self._place = pickle.loads(news.place)
        if news.ended and not self._said:
            self._said = True
            self._say_ended(*news.ended)
        return batch

    def _say_ended(self, number: int, samples: int) -> None:
        length = self._loader.length()
        if length is None:
            self._note(f"data        {self._loader.name} ended after {samples:,} samples, and begins again")
        elif length != samples:
            self._note(
                f"warning: {self._loader.name} yielded {samples:,} samples in pass {number + 1}, and its len() is "
                f"{length:,}: epochs are counted by len()"
            )

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream after what training has taken."""
        if self._loader.num_workers or not self._taken:
            return self._place
        return self._stream.passes.place()
