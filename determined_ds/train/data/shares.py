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

from determined_ds.errors import DataError, Problem
from determined_ds.train.data.loaders import drawn_for, with_batch_sampler
from determined_ds.train.data.streams import FirstRow, Made, ReplicaStream, reader_of
from determined_ds.trial.stream_loader import StreamLoader


class Share:
    """The validation batches of one replica.

    Of a Determined loader it is every ``replicas``-th batch in the loader's order. How many there are of a stream, or
    of a loader that is used as it is and gives each replica its own batches, is not known.

    Attributes:
        sizes: Samples in each batch; None where that is not known.
    """

    def __init__(
        self, loader: Any, *, replica: int, replicas: int, seed: int, length_of: Callable[[Any], int]
    ) -> None:
        self._length_of = length_of
        self.sizes: list[int] | None = None
        self.stream: ReplicaStream | None = None
        self._loader, self._padding = loader, None
        if isinstance(loader, pytorch.DataLoader):
            with drawn_for(loader.batch_sampler, seed, 0):
                everything = list(loader.batch_sampler or ())
            if not everything:
                raise no_validation()
            own = everything[replica::replicas]
            self._loader = with_batch_sampler(loader, own, 0)
            self._padding = with_batch_sampler(loader, everything[:1], 0)
            self.sizes = [len(samples) for samples in own]
        elif isinstance(loader, StreamLoader):
            size = loader.batch_size
            self.stream = ReplicaStream(
                loader, batch_size=size, replica=replica, replicas=replicas, seed=seed
            )
            self._loader = reader_of(loader, self.stream, seed)

    def made(self) -> Iterator[Made]:
        """The batches of a pass, with their samples."""
        if self.stream is not None:
            yield from self._loader
        elif self.sizes is not None:
            yield from map(Made, self._loader, self.sizes)
        else:
            # DeepSpeed's own loaders of a pipeline never end; their length, which Determined gives them, is a pass.
            is_endless = isinstance(self._loader, RepeatingLoader)
            for batch in itertools.islice(self._loader, len(self._loader) if is_endless else None):
                yield Made(batch, self._length_of(batch))

    def __iter__(self) -> Iterator[Any]:
        return (made.batch for made in self.made())

    def padding(self) -> Any:
        """A batch for a replica that has none of its own."""
        if self._padding is None:
            raise no_validation()
        return next(iter(self._padding))


def no_validation() -> DataError:
    """The error where there is nothing to validate on."""
    message = "the validation data has no batch"
    fix = "use more validation data, or a loader without drop_last"
    key = "build_validation_data_loader"
    return DataError(Problem(key=key, message=message, fix=fix, code="too-little-data"))


class Calls:
    """The iterator that ``evaluate_batch`` is given, and how many micro-batches each call of it takes.

    All ranks go through the same number of batches, since a forward pass may be collective (ZeRO 3, pipelines). A rank
    that has run out repeats its first batch, with weight 0. A pipeline's engine averages over the micro-batches that it
    takes at once, so it only takes those of equal weight at once: the last one, which may be smaller, goes by itself,
    and so does a replica's padding.

    Args:
        share: This rank's; None for a rank that has no data loader.
        exchange: Samples in the batches that this rank has read ahead, and what it read first of a stream -> the
            samples in those of each rank; a collective, called once where the numbers are known, and else until no
            rank has any.
        at_most: Micro-batches that an engine takes at once; None where there is no pipeline.
        ahead: Batches to read ahead where their number is not known.
        length_of: Samples in a batch.

    Attributes:
        taken: Batches so far, padding included; the same on all ranks.
        weights: Samples in each batch taken since :meth:`start_call`; 0 for padding.
    """

    def __init__(
        self,
        share: Share | None,
        exchange: Callable[[list[int], FirstRow | None], list[list[int]] | None],
        *,
        at_most: int | None,
        ahead: int,
        length_of: Callable[[Any], int],
    ) -> None:
        self.taken = 0
        self.weights: list[int] = []
        self._share = share
        self._made = iter(()) if share is None else share.made()
        self._is_counted = share is not None and share.sizes is not None
        self._own_left = len(share.sizes or ()) if share is not None else 0
        self._exchange = exchange
        self._at_most = at_most or 1
        self._num_ahead = max(ahead, self._at_most)
        self._length_of = length_of
        self._ahead: deque[Made] = deque()
        self._first: FirstRow | None = None
        self._padding: Any = None
        self._left = 0  # of those that all ranks know of
        self._call_at: dict[int, int] = {}  # batches left -> micro-batches of the call that begins there
        self._is_over = False

    def next_call(self) -> int:
        """Micro-batches that the next call takes; 0 at the end. May be a collective."""
        if not self._left and not self._is_over:
            self._plan()
        return self._call_at[self._left] if self._left else 0

    def _plan(self) -> None:
        if not self._is_counted:
            self._read_ahead()
        sizes = self._exchange([made.samples for made in self._ahead], self._first)
        if sizes is None:  # all of them were planned before
            self._is_over = True
            return
        self._left = count = max(len(own) for own in sizes)
        self._is_over = not count
        padded = [own + [0] * (count - len(own)) for own in sizes if own]
        weights = list(zip(*padded, strict=True))
        start = 0
        while start < count:
            end = start + 1
            while end < count and end - start < self._at_most and weights[end] == weights[start]:
                end += 1
            self._call_at |= {count - index: end - index for index in range(start, end)}
            start = end

    def _read_ahead(self) -> None:
        for made in itertools.islice(self._made, self._num_ahead - len(self._ahead)):
            if self._padding is None:
                self._padding = made.batch
                self._first = made.first
            if made.samples:
                self._ahead.append(made)
        self._own_left = len(self._ahead)

    def start_call(self) -> None:
        """Forget the weights of the batches before."""
        self.weights = []

    @property
    def exhausted(self) -> bool:
        """Whether this rank's own batches are used up, and only padding is left."""
        return self._share is not None and self._own_left == 0

    def __iter__(self) -> Calls:
        return self

    def __next__(self) -> Any:
        if self._share is None or not self.next_call():
            raise StopIteration
        self.skip(1)
        if self._own_left:
            self._own_left -= 1
            batch = self._ahead.popleft().batch if self._ahead else next(self._made).batch
            self.weights.append(self._length_of(batch))
            if self._padding is None:
                self._padding = batch
            return batch
        self.weights.append(0)
        if self._padding is None:
            self._padding = self._share.padding()
        return self._padding

    def skip(self, count: int) -> None:
        """Count batches that other ranks took; for a rank that has no data loader."""
        self.taken += count
        self._left -= count
