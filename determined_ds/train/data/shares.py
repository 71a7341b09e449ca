"""A replica's share of the validation data, to the last sample, and how many micro-batches go into a call.

For data with an index every rank knows beforehand how many batches each has. For a stream no rank does: ranks read some
batches ahead and exchange how many they have, until none has any.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from deepspeed.runtime.dataloader import RepeatingLoader
from determined import pytorch

from determined_ds.errors import DataError, Problem
from determined_ds.train.data.samples import drawn_for, with_batch_sampler
from determined_ds.train.data.streams import FirstRow, Made, News, ReplicaStream, torch_loader
from determined_ds.trial.stream_loader import StreamLoader


class CallPlan:
    """How many micro-batches each ``evaluate_batch`` of a pipeline takes.

    An engine averages over the micro-batches that it takes at once, so it only takes those of equal weight at once: the
    last one, which may be smaller, goes by itself, and so does a replica's padding.

    Args:
        sizes: Of each rank, the samples in each of its batches; empty where it has no data loader.
        at_most: Micro-batches that an engine takes at once; None where there is no pipeline.
    """

    def __init__(self, sizes: list[list[int]], *, at_most: int | None) -> None:
        self.num_batches = max(len(own) for own in sizes)
        weights = [
            tuple(own[index] if index < len(own) else 0 for own in sizes if own)
            for index in range(self.num_batches)
        ]
        self._left: dict[int, int] = {}  # batches left -> micro-batches of the call that begins there
        start = 0
        while start < self.num_batches:
            end = start + 1
            while end < self.num_batches and end - start < (at_most or 1) and weights[end] == weights[start]:
                end += 1
            for index in range(start, end):
                self._left[self.num_batches - index] = end - index
            start = end

    def next(self, left: int) -> int:
        """Micro-batches that the next call takes, with ``left`` yet to come."""
        return self._left[left]


# --------------------------------------------------------------------------------------------- shares


class Reading(Protocol):
    """One pass over a replica's own batches; ``left`` counts those yet to come, as far as is known."""

    @property
    def left(self) -> int: ...

    def take(self) -> Any: ...

    def padding(self) -> Any: ...


class IndexedShare:
    """The validation batches of one replica: every ``replicas``-th batch in the order of a Determined loader.

    ``seed`` is that of its sampler, the same on all ranks.

    Attributes:
        sizes: Samples in each batch.
    """

    def __init__(self, loader: pytorch.DataLoader, *, replica: int, replicas: int, seed: int = 0) -> None:
        with drawn_for(loader.batch_sampler, seed, 0):
            everything = list(loader.batch_sampler or ())
        if not everything:
            raise _no_validation()
        own = everything[replica::replicas]
        self._loader = with_batch_sampler(loader, own, 0)
        self._padding = with_batch_sampler(loader, everything[:1], 0)
        self.sizes = [len(samples) for samples in own]

    def open(self) -> IndexedReading:
        """Begin a pass."""
        return IndexedReading(iter(self._loader), len(self.sizes), lambda: next(iter(self._padding)))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


class IndexedReading:
    """A pass over an :class:`IndexedShare`."""

    def __init__(self, batches: Iterator[Any], left: int, padding: Callable[[], Any]) -> None:
        self.left = left
        self.padding = padding
        self._batches = batches

    def take(self) -> Any:
        self.left -= 1
        return next(self._batches)


class UncountedShare:
    """The validation batches of one replica of a stream, or of a loader that is used as it is: their number is unknown.

    Args:
        loader: A ``StreamLoader``, or another loader, which gives each replica its own batches.
        replica: Data-parallel rank.
        replicas: Data-parallel copies.
        seed: Of the run.
        length_of: Samples in a batch, for a loader that does not report them.
    """

    sizes: None = None

    def __init__(
        self, loader: Any, *, replica: int, replicas: int, seed: int, length_of: Callable[[Any], int]
    ) -> None:
        self._loader = loader
        self._length_of = length_of
        self._stream: ReplicaStream | None = None
        if isinstance(loader, StreamLoader):
            self._stream = ReplicaStream(
                loader, batch_size=loader.batch_size, replica=replica, replicas=replicas, seed=seed
            )
            self._loader = torch_loader(loader, self._stream, seed)

    def open(self) -> UncountedReading:
        """Begin a pass."""
        return UncountedReading(self._made(), self._stream)

    def _made(self) -> Iterator[Made]:
        if self._stream is not None:
            yield from self._loader
        else:
            # DeepSpeed's own loaders of a pipeline never end; their length, which Determined gives them, is a pass.
            is_endless = isinstance(self._loader, RepeatingLoader)
            for batch in itertools.islice(self._loader, len(self._loader) if is_endless else None):
                yield Made(batch, self._length_of(batch), News())

    def __iter__(self) -> Iterator[Any]:
        return (made.batch for made in self._made())


class UncountedReading:
    """A pass over an :class:`UncountedShare`.

    Attributes:
        first: What was read first of a stream; None before :meth:`ahead`.
    """

    def __init__(self, made: Iterator[Made], stream: ReplicaStream | None) -> None:
        self.first: FirstRow | None = None
        self._made = made
        self._stream = stream
        self._ahead: deque[Made] = deque()
        self._padding: Any = None

    def ahead(self, count: int) -> list[int]:
        """Read up to ``count`` batches ahead. Returns the samples in each."""
        for made in itertools.islice(self._made, count - len(self._ahead)):
            if self._padding is None:
                self._padding = made.batch
                if self._stream is not None:  # see check_first_rows
                    self.first = self._stream.first_row(made.news.first)
            if made.samples:
                self._ahead.append(made)
        return [made.samples for made in self._ahead]

    @property
    def left(self) -> int:
        return len(self._ahead)

    def take(self) -> Any:
        return self._ahead.popleft().batch

    def padding(self) -> Any:
        if self._padding is None:
            raise _no_validation()
        return self._padding


def validation_share(loader: Any, *, length_of: Callable[[Any], int], **place: int) -> Any:
    """A replica's share of what ``build_validation_data_loader`` returned; ``place``: replica, replicas, seed."""
    if isinstance(loader, pytorch.DataLoader):
        return IndexedShare(loader, **place)
    return UncountedShare(loader, length_of=length_of, **place)


def _no_validation() -> DataError:
    message, fix = (
        "the validation data has no batch",
        "use more validation data, or a loader without drop_last",
    )
    key = "build_validation_data_loader"
    return DataError(Problem(key=key, message=message, fix=fix, code="too-little-data"))


# --------------------------------------------------------------------------------------------- a pass


class ValidationBatches:
    """The iterator that ``evaluate_batch`` is given. It counts what is taken.

    All ranks go through the same number of batches, since a forward pass may be collective (ZeRO 3, pipelines). A rank
    that has run out repeats its first batch, with weight 0.

    Args:
        reading: A pass over this rank's share; None for a rank that has no data loader.
        plans: The plan of the next batches, again and again, the same on all ranks; taking one may be a collective.
        length_of: Samples in a batch.

    Attributes:
        taken: Batches so far, padding included; the same on all ranks.
        weights: Samples in each batch taken since :meth:`start_call`; 0 for padding.
    """

    def __init__(self, reading: Any, plans: Iterator[CallPlan], length_of: Callable[[Any], int]) -> None:
        self.taken = 0
        self.weights: list[int] = []
        self._reading: Reading | None = reading
        self._plans = plans
        self._plan: CallPlan | None = None
        self._left = 0  # of the plan
        self._length_of = length_of
        self._padding: Any = None

    def next_call(self) -> int:
        """Micro-batches that the next call takes; 0 at the end."""
        if not self._left:
            self._plan = next(self._plans, None)
            self._left = self._plan.num_batches if self._plan is not None else 0
        return self._plan.next(self._left) if self._plan is not None else 0

    def start_call(self) -> None:
        """Forget the weights of the batches before."""
        self.weights = []

    @property
    def exhausted(self) -> bool:
        """Whether this rank's own batches are used up, and only padding is left."""
        return self._reading is not None and self._reading.left == 0

    def __iter__(self) -> ValidationBatches:
        return self

    def __next__(self) -> Any:
        if self._reading is None or not self.next_call():
            raise StopIteration
        self.skip(1)
        if self._reading.left:
            batch = self._reading.take()
            self.weights.append(self._length_of(batch))
            if self._padding is None:
                self._padding = batch
            return batch
        self.weights.append(0)
        if self._padding is None:
            self._padding = self._reading.padding()
        return self._padding

    def skip(self, count: int) -> None:
        """Count batches that other ranks took; for a rank that has no data loader."""
        self.taken += count
        self._left -= count
