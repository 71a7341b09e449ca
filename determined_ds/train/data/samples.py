"""Which samples a replica trains on and validates, and when.

Training is one global stream of samples, epoch after epoch, cut into global batches; a replica takes its share of each.
So an optimizer step has the same samples for any split into replicas and micro-batches, and a position in the stream
is one number. Determined 0.38.1 shards and skips by micro-batches instead, which depends on both.

Validation goes to the last sample. For data with an index every rank knows beforehand how many batches each has. For a
stream no rank does: ranks read some batches ahead and exchange how many they have, until none has any.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed.runtime.dataloader import RepeatingLoader
from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.config.layout import Batch
from determined_ds.errors import ConfigError, DataError, Problem
from determined_ds.train.data.loaders import drawn_for, too_little, with_batch_sampler
from determined_ds.train.data.seeds import mixed_seed, seed_everything
from determined_ds.train.data.streams import FirstRow, Made, ReplicaStream, read, takes
from determined_ds.trial.returned import refused
from determined_ds.trial.stream_loader import StreamLoader, length_of

METHOD = "build_training_data_loader"
Note = Callable[[str], None]  # shows a line
APART = "apart"  # in the position of data that has one on each replica
# Batches of a stream that are read ahead, to ask the other ranks less often whether they have any.
AHEAD = 4
MANY_READERS = 8  # of a whole stream, from which on a warning says how many there are


class TrainingData:
    """A rank's endless micro-batches, and the position in them that a checkpoint holds.

    Attributes:
        batches: Them, once it is open.
        samples: Of data with an index: the indices of the samples in a range of global batches, from 1.
        inexact: Why a position in it cannot be returned to exactly; "" where it can.
        batches_per_epoch: Global batches; None where that is not known.
        first: What was read first, of a stream.
        place: The position after what training has taken; None where the number of batches says all.
        apart: The name of a stream that gives each replica samples of its own.
    """

    def __init__(self) -> None:
        self.batches: Iterator[Any] | None = None
        self.samples: Callable[[int, int], list[int]] | None = None
        self.inexact = ""
        self.batches_per_epoch: int | None = None
        self.first: FirstRow | None = None
        self.place: Callable[[], dict[str, Any]] | None = None
        self.apart: str | None = None
        self._found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        place = {} if self.place is None else self.place()
        return place if self.apart is None else {**place, APART: self.apart}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have :meth:`open` continue from a position."""
        self._found = dict(state_dict)

    def open(self, loader: Any, note: Note, batch: Batch, replica: int, seed: int, start_batch: int) -> None:
        """Begin to read a replica's share of what ``build_loader`` returned, after ``start_batch`` global batches."""
        self.batches_per_epoch = whole_batches(loader, batch)
        if isinstance(loader, pytorch.DataLoader):
            per_epoch = self.batches_per_epoch or 0
            self.batches, self.samples = _indexed(loader, batch, per_epoch, replica, seed, start_batch)
        elif isinstance(loader, StreamLoader):
            replicas = 1 if loader.sharded else batch.replicas  # that read what is read here
            per_batch = batch.micro_batch_size * batch.accumulation * replicas
            place = {"samples": start_batch * per_batch, **self._found}
            if place["samples"] and not takes(loader, place):
                said = f"data        {loader.name} has no state_dict: reading and skipping {place['samples']:,} samples"
                note(f"{said}, to resume after batch {start_batch}")
            if (readers := max(1, loader.num_workers) * replicas) >= MANY_READERS:
                note(
                    f"warning: every sample of {loader.name} is read {readers} times, by each worker of each replica\n"
                    "  fix: give each replica a part (dataset.shard, or its files) with sharded=True; or use fewer "
                    "workers, and do the work on a sample in collate_fn, which sees only those that are kept"
                )
            split = (replica, batch.replicas, batch.accumulation)
            stream = ReplicaStream(loader, seed, *split, start_batch=start_batch, place=place)
            self.apart = loader.name if loader.sharded else None
            self.inexact = "" if takes(loader, {"state": True}) else f"{loader.name} has no state_dict"
            position = [pickle.dumps(place)]
            self.place = lambda: dict(pickle.loads(position[0]))
            # Without workers, collate_fn runs, and draws random numbers, only when training takes what it makes.
            self.first, made = read(stream.reader(seed + start_batch))
            self.batches = _taken(made, position)
        else:
            self.inexact = f"{type(loader).__name__} has no state_dict"
            self.batches = _again_and_again(loader)
            for _ in range(start_batch * batch.accumulation):
                next(self.batches)


def _taken(stream: Iterator[Made], position: list[bytes]) -> Iterator[Any]:
    """The micro-batches, with the position after the last one. Refers to no data: workers end with the last reference.

    Python's collector would let go of their queues first, and then wait five seconds for each of them.
    """
    for made in stream:
        position[0] = made.place or position[0]
        yield made.batch


def whole_batches(loader: Any, batch: Batch) -> int | None:
    """Global batches in a pass over training data; None where that is not known.

    Refuses other micro-batches, and less than a global batch.
    """
    batches: Any = loader.batch_sampler if isinstance(loader, pytorch.DataLoader) else loader
    is_stream, is_indexed = isinstance(loader, StreamLoader), batches is not loader
    data, what, need = batches, "micro-batches", batch.accumulation
    if is_stream or type(batches) is torch_data.BatchSampler:
        if batches.batch_size != batch.micro_batch_size:
            message = f"the data loader's batch_size is not the micro-batch size {batch.micro_batch_size}"
            fix = "use self.training_loader(dataset), or batch_size=context.get_train_micro_batch_size_per_gpu()"
            raise refused(METHOD, message, fix, "loader-batch-size", value=batches.batch_size)
        data, what = loader.dataset if is_stream else batches.sampler, "samples"
        need *= batch.micro_batch_size
    if is_indexed or (is_stream and not loader.sharded):
        need *= batch.replicas
    have = len(data) if is_indexed else length_of(data)
    if have is not None and have < need:
        message = f"the training data has {have} {what}, less than one global batch of {need}"
        fix = f"use more data, or a global batch of at most {have} {what}" if have else "use more data"
        raise too_little("hyperparameters.global_batch_size", message, fix, value=need)
    return None if have is None else have // need


def _indexed(
    loader: Any, batch: Batch, per_epoch: int, replica: int, seed: int, start_batch: int
) -> tuple[Iterator[Any], Callable[[int, int], list[int]]]:
    """Data with an index: of the micro-batches of the global stream, every ``replicas``-th is this replica's."""
    batches: Any = loader.batch_sampler
    per_step, is_cut = batch.accumulation * batch.replicas, type(batches) is torch_data.BatchSampler

    def order_of(epoch: int) -> list[Any]:
        with drawn_for(batches, seed, epoch):
            order = list(itertools.islice(batches, per_epoch * per_step))
        if len(order) < per_epoch * per_step or (is_cut and len(order[-1]) < batch.micro_batch_size):
            said = f"{type(batches.sampler if is_cut else batches).__name__} yields less than its len() in an epoch"
            raise too_little(METHOD, said, "have __len__ return what it yields")
        return order

    def samples(first: int, last: int) -> list[int]:
        numbers = range((first - 1) * per_step, last * per_step)
        orders = {epoch: order_of(epoch) for epoch in {at // (per_epoch * per_step) for at in numbers}}
        found = (orders[at // (per_epoch * per_step)][at % (per_epoch * per_step)] for at in numbers)
        return [int(index) for each in found for index in each]

    def micro_batches() -> Iterator[Any]:
        epoch, first = divmod(start_batch, per_epoch)
        while True:
            yield from order_of(epoch)[first * per_step + replica :: batch.replicas]
            epoch, first = epoch + 1, 0

    indices, dataset = micro_batches(), None
    if loader.num_workers > 0:
        numbered = enumerate(indices, start_batch * batch.accumulation)
        indices = ((mixed_seed(seed, replica, number), list(each)) for number, each in numbered)
        dataset = SeededDataset(loader.dataset)
    return iter(with_batch_sampler(loader, indices, seed + start_batch, dataset)), samples


class SeededDataset(torch_data.Dataset[Any]):
    """A map-style dataset whose micro-batches are each made under a seed, which comes with their indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[Any]:
        seed, indices = batch
        seed_everything(seed)
        at_once = getattr(self._dataset, "__getitems__", None)
        return list(at_once(indices)) if at_once else [self._dataset[index] for index in indices]


def _again_and_again(loader: Any) -> Iterator[Any]:
    """The micro-batches of a loader that is used as it is."""
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
    fix = "use more data, or make iter() begin anew each time"
    raise too_little(type(loader).__name__, "the data loader yields no batch", fix)


# ------------------------------------------------------------------------------------ batches that are left out

Range = tuple[int, int]  # the first and the last batch, both included


class Skips:
    """Ranges of batches of the data that are not trained on: ``fit.skip_batches``, and those around a spike.

    A batch of the data has a number, from 1, whatever was left out before it. Training takes them in order, and draws
    and discards those of a range when it comes to it, just before the batch behind it. So where training stands follows
    from the number of trained batches alone, on every rank.

    Args:
        stated: Those that the run is to leave out.
        passed: Those that it has left out up to its checkpoint, as the checkpoint records them.
        batches_trained: Until then.

    Attributes:
        ranges: All of them, in order.

    Raises:
        ConfigError: a batch is to be left out that the checkpoint was trained on.
    """

    def __init__(self, stated: Sequence[Range], passed: Sequence[Range], batches_trained: int) -> None:
        self.ranges = sorted(passed)
        taken = self.taken(batches_trained)
        for first, last in stated:
            first = max([first, *(end + 1 for was, end in passed if was <= first <= end)])
            if first > last:
                continue
            if first <= taken:
                message = (
                    f"{first} to {last}: the checkpoint was trained on the first {taken} batches of the data"
                )
                fix = "resume from a checkpoint before them, e.g. --resume UUID, or leave them in"
                key, code = "hyperparameters.fit.skip_batches", "skip-trained"
                raise ConfigError(Problem(key=key, message=message, fix=fix, code=code))
            self.ranges.append((first, last))
        self.ranges.sort()

    def passed(self, batches_trained: int) -> list[Range]:
        """Those that lie before the last trained batch."""
        found, taken = [], batches_trained
        for first, last in self.ranges:
            if first > taken:
                break
            found.append((first, last))
            taken += last - first + 1
        return found

    def taken(self, batches_trained: int) -> int:
        """Batches of the data that were taken or left out up to there: the number of the last trained one."""
        return batches_trained + sum(last - first + 1 for first, last in self.passed(batches_trained))

    def around(self, batch: int, size: int) -> list[Range]:
        """Every range, with another one of ``size`` batches around the step ``batch``, from 1."""
        first = max(1, self.taken(batch) - size // 2)
        last = first + size - 1
        for was, end in self.ranges:  # nothing is left out twice
            if was <= first <= end:
                first, last = end + 1, last + end + 1 - first
            elif first < was <= last:
                last = was - 1
        return sorted([*self.ranges, (first, last)])

    def discarding(
        self, batches: Iterator[Any], per_batch: int, batches_trained: int, said: Callable[[Range, int], None]
    ) -> Iterator[Any]:
        """A rank's micro-batches, ``per_batch`` of each batch, without those of the ranges that lie ahead.

        ``said`` is called with each range that is left out, and the batches trained before it.
        """
        while True:
            for each in self.passed(batches_trained + 1)[len(self.passed(batches_trained)) :]:
                said(each, batches_trained)
                for _ in range((each[1] - each[0] + 1) * per_batch):
                    next(batches)
            for _ in range(per_batch):
                yield next(batches)
            batches_trained += 1


# ------------------------------------------------------------------------------------ validation


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
            self._loader = ReplicaStream(loader, seed, replica, replicas).reader(seed)

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
    fix = "use more data, or a loader without drop_last"
    return too_little("build_validation_data_loader", "the validation data has no batch", fix)


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
        self._read = self._made = iter(()) if share is None else share.made()
        self._padding: Any = None
        # Of the next batches: samples on each rank. All of them at once, where the sizes are known.
        self._rows = deque(itertools.zip_longest(*sizes or (), fillvalue=0))
        self._are_all = sizes is not None

    def next_call(self) -> int:
        """Micro-batches that the next call takes; 0 at the end. May be a collective."""
        if not self._rows and not self._are_all:
            ahead = list(itertools.islice(self._read, max(AHEAD, self._at_most)))
            if ahead and self._padding is None:
                self._padding = ahead[0].batch
            own = [made for made in ahead if made.samples]
            self._made = iter(own)
            first = self._share and self._share.first
            ranks = self._distributed.allgather(([made.samples for made in own], first))
            self.firsts = [first for _, first in ranks]
            self._rows.extend(itertools.zip_longest(*(samples for samples, _ in ranks), fillvalue=0))
            self._are_all = not self._rows
        alike = itertools.islice(self._rows, self._at_most)
        return sum(1 for _ in itertools.takewhile(lambda row: row == self._rows[0], alike))

    @property
    def exhausted(self) -> bool:
        """Whether the next batch of this rank is padding."""
        return self._share is not None and not self._rows[0][self._distributed.rank]

    def __iter__(self) -> Calls:
        return self

    def __next__(self) -> Any:
        if self._share is None or not self.next_call():
            raise StopIteration
        is_padding, batch = self.exhausted, self._padding
        self.skip(1)
        if not is_padding or batch is None:
            made = next(self._made, None)
            if made is None:
                raise _no_validation()
            batch = made.batch
            self._padding = batch if self._padding is None else self._padding
        self.weights.append(0 if is_padding else self._share.length_of(batch))
        return batch

    def skip(self, count: int) -> None:
        """Count batches that other ranks took; for a rank that has no data loader."""
        self.taken += count
        for _ in range(count):
            self._rows.popleft()
