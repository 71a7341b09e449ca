"""A replica's share of the validation data, to the last sample, and how many micro-batches go into a call.

For data with an index every rank knows beforehand how many batches each has. For a stream no rank does: ranks read some
batches ahead and exchange how many they have, until none has any.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime.dataloader import RepeatingLoader
from determined import pytorch

from determined_ds.config.layout import Batch
from determined_ds.errors import DataError, Problem
from determined_ds.train.data.loaders import drawn_for, with_batch_sampler
from determined_ds.train.data.streams import FirstRow, Made, ReplicaStream, read
from determined_ds.trial.stream_loader import StreamLoader

# Batches of a stream that are read ahead, to ask the other ranks less often whether they have any.
AHEAD = 4


class Share:
    """The validation batches of one replica.

    Of a Determined loader it is every ``replicas``-th batch in the loader's order. How many there are of a stream, or
    of a loader that is used as it is and gives each replica its own batches, is not known.
    """

    def __init__(
        self, loader: Any, *, replica: int, replicas: int, seed: int, length_of: Callable[[Any], int]
    ) -> None:
        self.sizes: list[int] | None = None
        self.first: FirstRow | None = None
        self.length_of = length_of
        self._loader, self._is_stream = loader, isinstance(loader, StreamLoader)
        if isinstance(loader, pytorch.DataLoader):
            with drawn_for(loader.batch_sampler, seed, 0):
                everything = list(loader.batch_sampler or ())
            if not everything:
                raise _no_validation()
            own = everything[replica::replicas]
            self.sizes = [len(samples) for samples in own]
            self._loader = with_batch_sampler(loader, own or everything[:1], 0)
        elif self._is_stream:
            size = loader.batch_size
            row = Batch(
                global_batch_size=size * replicas, replicas=replicas, accumulation=1, micro_batch_size=size
            )
            self._loader = ReplicaStream(loader=loader, batch=row, replica=replica, seed=seed).reader(seed)

    def made(self) -> Iterator[Made]:
        """The batches of a pass, with their samples; a replica that has none gets one of another, with 0 samples."""
        if self._is_stream:
            self.first, made = read(self._loader)
            yield from made
        elif self.sizes is not None:
            yield from map(Made, self._loader, self.sizes or [0])
        else:
            # DeepSpeed's own loaders of a pipeline never end; their length, which Determined gives them, is a pass.
            is_endless = isinstance(self._loader, RepeatingLoader)
            for batch in itertools.islice(self._loader, len(self._loader) if is_endless else None):
                yield Made(batch, self.length_of(batch))

    def __iter__(self) -> Iterator[Any]:
        return (made.batch for made in self.made())


def _no_validation() -> DataError:
    message, fix = "the validation data has no batch", "use more data, or a loader without drop_last"
    key = "build_validation_data_loader"
    return DataError(Problem(key=key, message=message, fix=fix, code="too-little-data"))


class Calls:
    """The iterator that ``evaluate_batch`` is given, and how many micro-batches each call of it takes.

    All ranks go through the same number of batches, since a forward pass may be collective (ZeRO 3, pipelines). A rank
    that has run out repeats its first batch, with weight 0. A pipeline's engine averages over the micro-batches that it
    takes at once, so it only takes those of equal weight at once: the last one, which may be smaller, goes by itself,
    and so does a replica's padding.
    """

    def __init__(
        self, share: Share | None, sizes: list[list[int]] | None, distributed: Any, *, at_most: int
    ) -> None:
        self.taken = 0
        self.weights: list[int] = []
        self.firsts: list[FirstRow | None] = []
        self._share, self._distributed, self._at_most = share, distributed, at_most
        self._made = iter(()) if share is None else share.made()
        self._ahead: deque[Made] = deque()
        self._padding: Any = None
        self._rows: deque[tuple[int, ...]] = deque()  # of the next known batches: samples on each rank
        self._coming = self._exchanged() if sizes is None else iter([_rows_of(sizes)])

    def next_call(self) -> int:
        """Micro-batches that the next call takes; 0 at the end. May be a collective."""
        if not self._rows:
            self._rows.extend(next(self._coming, ()))
        alike = itertools.islice(self._rows, self._at_most)
        return sum(1 for _ in itertools.takewhile(lambda row: row == self._rows[0], alike))

    def _exchanged(self) -> Iterator[list[tuple[int, ...]]]:
        """The rows that the ranks have read ahead, until none has any; each a collective."""
        while True:
            for made in itertools.islice(self._made, max(AHEAD, self._at_most)):
                self._padding = made.batch if self._padding is None else self._padding
                if made.samples:
                    self._ahead.append(made)
            first = None if self._share is None else self._share.first
            ranks = self._distributed.allgather(([made.samples for made in self._ahead], first))
            self.firsts = [first for _, first in ranks]
            if not (rows := _rows_of([sizes for sizes, _ in ranks])):
                return
            yield rows

    @property
    def exhausted(self) -> bool:
        """Whether the next batch of this rank is padding."""
        return self._share is not None and not self._rows[0][self._distributed.rank]

    def __iter__(self) -> Calls:
        return self

    def __next__(self) -> Any:
        if self._share is None or not self.next_call():
            raise StopIteration
        own, batch = self._rows[0][self._distributed.rank], self._padding
        self.skip(1)
        if own or batch is None:
            made = self._ahead.popleft() if self._ahead else next(self._made, None)
            if made is None:
                raise _no_validation()
            batch = made.batch
            self._padding = batch if self._padding is None else self._padding
        self.weights.append(self._share.length_of(batch) if own else 0)
        return batch

    def skip(self, count: int) -> None:
        """Count batches that other ranks took; for a rank that has no data loader."""
        self.taken += count
        for _ in range(count):
            self._rows.popleft()


def _rows_of(sizes: list[list[int]]) -> list[tuple[int, ...]]:
    return list(itertools.zip_longest(*sizes, fillvalue=0))
