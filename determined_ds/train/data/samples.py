"""Which samples a rank trains on, and when.

Training is one global stream of samples, epoch after epoch, cut into global batches; a replica takes its share of each.
So an optimizer step has the same samples for any split into replicas and micro-batches, and a position in the stream
is one number. Determined 0.38.1 shards and skips by micro-batches instead, which depends on both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.config.layout import Batch
from determined_ds.errors import ConfigError, DataError, Problem
from determined_ds.train.data.loaders import GivenBatches
from determined_ds.train.data.passes import samples_to_skip
from determined_ds.train.data.seeds import SeededDataset, SeededSampler, start_worker
from determined_ds.train.data.streams import FirstRow, ReplicaStream, TrainingStream
from determined_ds.trial.stream_loader import StreamLoader

METHOD = "build_training_data_loader"
APART = "apart"  # in the position of data that has one on each replica


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """A rank's endless stream of micro-batches.

    Args:
        batches: The micro-batches, from the batch that training starts at.
        batches_per_epoch: Whole global batches in an epoch; None for a stream without a length. What is left over of
            data with an index is dropped; where the data is shuffled, different samples each epoch.
        place: Has the position as its ``state_dict``, where that is more than a number of batches.
        first: What was read first of a stream.
    """

    batches: Iterator[Any]
    batches_per_epoch: int | None
    place: Any = None
    first: FirstRow | None = None


class DataPlace:
    """The position in the training data that a checkpoint holds, where it is more than a number of batches.

    Attributes:
        found: What the loaded checkpoint held; empty without one.
        of: The data that is read, which knows its position; None where the number of batches says all.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.of: Any = None

    def state_dict(self) -> dict[str, Any]:
        state = dict(self.of.state_dict()) if self.of is not None else {}
        return {**state, APART: self.apart} if state and self.apart else state

    @property
    def apart(self) -> tuple[str, bool] | None:
        """Of data that has another position on each replica: its name, and whether that counts in micro-batches."""
        return getattr(self.of, "apart", None)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.found = dict(state_dict)


def training_data(
    loader: Any,
    *,
    batch: Batch,
    replica: int,
    seed: int,
    start_batch: int,
    manual: bool = False,
    place: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = print,
) -> TrainingData:
    """A rank's share of the training data.

    Args:
        loader: What ``build_training_data_loader`` returned: a Determined ``DataLoader``, a ``StreamLoader``, or
            another loader, which is used as it is.
        batch: The completed batch.
        replica: Data-parallel rank, 0 .. replicas - 1.
        seed: Of the shuffle; the same on all ranks.
        start_batch: Batches already trained.
        manual: The trial accumulates gradients itself, in batches of the loader's size.
        place: The position in the data that a checkpoint holds.
        note: Shows a line to the user.

    Raises:
        ConfigError: the loader's batch size is not the micro-batch size.
        DataError: the data is smaller than one global batch.
    """
    place = place or {}
    if isinstance(loader, StreamLoader):
        batch = _split(loader.batch_size, batch, manual)
        return _stream(loader, batch, replica, seed, start_batch, place, note)
    if isinstance(loader, pytorch.DataLoader):
        return _indexed(loader, batch, replica, seed, start_batch, manual)
    given = GivenBatches(loader, skip=start_batch * batch.accumulation, place=place)
    return TrainingData(
        batches=given, batches_per_epoch=_epoch_of_given(loader, batch.accumulation), place=given
    )


def _split(size: int | None, batch: Batch, manual: bool) -> Batch:
    """The batch in micro-batches of the loader's size, if that is allowed."""
    size = int(size or 0)
    divides = size > 0 and batch.global_batch_size % (size * batch.replicas) == 0
    if size != batch.micro_batch_size and not (manual and divides):
        message = f"the data loader's batch_size is not the micro-batch size {batch.micro_batch_size}"
        fix = "use self.training_loader(dataset), or batch_size=context.get_train_micro_batch_size_per_gpu()"
        raise ConfigError(Problem(key=METHOD, value=size, message=message, fix=fix, code="loader-batch-size"))
    accumulation = batch.global_batch_size // (size * batch.replicas)
    return replace(batch, micro_batch_size=size, accumulation=accumulation)


def _too_few(have: int, what: str, need: int) -> DataError:
    message = f"the training data has {have} {what}, less than one global batch of {need}"
    fix = f"use more data, or a global batch of at most {have} {what}"
    key = "hyperparameters.global_batch_size"
    return DataError(Problem(key=key, value=need, message=message, fix=fix, code="too-little-data"))


def _epoch_of_given(loader: Any, accumulation: int) -> int | None:
    try:
        num_batches = len(loader)
    except (TypeError, NotImplementedError):
        return None
    if num_batches < accumulation:
        raise _too_few(num_batches, "micro-batches", accumulation)
    return num_batches // accumulation


def _stream(
    loader: StreamLoader,
    batch: Batch,
    replica: int,
    seed: int,
    start_batch: int,
    place: Mapping[str, Any],
    note: Callable[[str], None],
) -> TrainingData:
    per_batch = batch.global_batch_size // (batch.replicas if loader.sharded else 1)
    length = loader.length()
    if length is not None and length < per_batch:
        raise _too_few(length, "samples", per_batch)
    if start_batch and not place:  # of a checkpoint that was written before streams were supported
        place = {"samples": start_batch * per_batch}
    if skip := samples_to_skip(loader, place) if place else 0:
        note(
            f"data        {loader.name} has no state_dict: reading and skipping {skip:,} samples, to resume after "
            f"batch {start_batch}"
        )
    stream = ReplicaStream(
        loader,
        batch_size=batch.micro_batch_size,
        replica=replica,
        replicas=batch.replicas,
        seed=seed,
        accumulation=batch.accumulation,
        start_batch=start_batch,
        place=place,
    )
    batches = TrainingStream(loader, stream, place=place, seed=seed + start_batch, note=note)
    per_epoch = None if length is None else length // per_batch
    return TrainingData(batches=batches, batches_per_epoch=per_epoch, place=batches, first=batches.first)


# ------------------------------------------------------------------------------------ data with an index


def _indexed(
    loader: pytorch.DataLoader, batch: Batch, replica: int, seed: int, start_batch: int, manual: bool
) -> TrainingData:
    batches: Any = loader.batch_sampler
    if type(batches) is torch_data.BatchSampler:
        batch = _split(batches.batch_size, batch, manual)
        num_samples = _length_of(batches.sampler)
        if num_samples < batch.global_batch_size:
            raise _too_few(num_samples, "samples", batch.global_batch_size)
        order = _epoch_order(batches.sampler, num_samples, len(loader.dataset), seed)  # type: ignore[arg-type]
        count, epoch = num_samples // batch.micro_batch_size, _cut(order, batch.micro_batch_size)
    else:
        count, per_step = len(batches), batch.accumulation * batch.replicas
        if count < per_step:
            raise _too_few(count, "micro-batches", per_step)
        whole = count - count % per_step
        epoch = lambda number: _drawn(batches, whole, count, seed, number).__getitem__  # noqa: E731
    sampler = GlobalSampler(epoch, count, batch=batch, replica=replica, start_batch=start_batch)
    indices: Any = sampler
    if loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.dataset = SeededDataset(loader.dataset)
        indices = SeededSampler(sampler, first=start_batch * batch.accumulation, replica=replica, seed=seed)
    torch_loader = with_batch_sampler(loader, indices, seed + start_batch)
    return TrainingData(batches=iter(torch_loader), batches_per_epoch=sampler.batches_per_epoch)


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        message = "the sampler has no len(): how many samples an epoch has is not known"
        name = type(sampler).__name__
        problem = Problem(
            key=METHOD, value=name, message=message, fix="give it a __len__", code="loader-sampler"
        )
        raise ConfigError(problem) from None


class GlobalSampler(torch_data.Sampler[list[int]]):
    """Micro-batches of one replica: of those of the global stream, every ``replicas``-th.

    Args:
        epoch: Number of an epoch -> a function from the index of a micro-batch in it to the indices of its samples.
        count: Micro-batches in an epoch; those that do not fill a global batch are dropped.
    """

    def __init__(
        self,
        epoch: Callable[[int], Callable[[int], list[int]]],
        count: int,
        *,
        batch: Batch,
        replica: int,
        start_batch: int,
    ) -> None:
        self._epoch = epoch
        self._batch = batch
        self._replica = replica
        self._start_batch = start_batch
        self._per_step = batch.accumulation * batch.replicas
        self.batches_per_epoch = count // self._per_step

    def __iter__(self) -> Iterator[list[int]]:
        number, first = divmod(self._start_batch, self.batches_per_epoch)
        while True:
            micro_batch, start = self._epoch(number), first * self._per_step + self._replica
            for index in range(start, self.batches_per_epoch * self._per_step, self._batch.replicas):
                yield micro_batch(index)
            number, first = number + 1, 0

    def __len__(self) -> int:
        return self.batches_per_epoch * self._batch.accumulation


def _cut(order: Callable[[int], list[int]], size: int) -> Callable[[int], Callable[[int], list[int]]]:
    """The micro-batches of an epoch, cut from its order."""

    def epoch(number: int) -> Callable[[int], list[int]]:
        samples = order(number)
        return lambda index: samples[index * size : (index + 1) * size]

    return epoch


def _epoch_order(sampler: Any, num_samples: int, size: int, seed: int) -> Callable[[int], list[int]]:
    """The order of an epoch's samples, as a function of its number alone where possible."""
    is_random = isinstance(sampler, torch_data.RandomSampler)
    if is_random and not sampler.replacement and sampler.num_samples == size:

        def shuffled(epoch: int) -> list[int]:
            generator = torch.Generator().manual_seed(_seed_of(seed, epoch))
            return torch.randperm(num_samples, generator=generator).tolist()

        return shuffled
    return functools.partial(_drawn, sampler, num_samples, num_samples, seed)


def _drawn(sampler: Any, count: int, length: int, seed: int, epoch: int) -> list[Any]:
    """The first ``count`` items of a sampler of length ``length`` in an epoch."""
    with drawn_for(sampler, seed, epoch):
        found = list(itertools.islice(sampler, count))
    if len(found) < count:
        message = f"the sampler yielded {len(found)}, and its len() is {length}"
        fix = "have __len__ return what it yields in an epoch"
        raise DataError(Problem(key=type(sampler).__name__, message=message, fix=fix, code="loader-sampler"))
    return found


@contextlib.contextmanager
def drawn_for(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """What a sampler draws in here is the same on every rank, and again on every resume.

    Seeds torch's global generator, and the generator of the sampler or of one that it batches, as torch's have.
    """
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(_seed_of(seed, epoch))
        inner: Any = getattr(sampler, "sampler", None)
        for each in (sampler, inner):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
            own = getattr(each, "generator", None)
            if isinstance(own, torch.Generator):
                own.manual_seed(_seed_of(seed, epoch))
        yield


def _seed_of(seed: int, epoch: int) -> int:
    return (seed * 1_000_003 + epoch) % 2**63


def with_batch_sampler(loader: pytorch.DataLoader, sampler: Any, seed: int) -> torch_data.DataLoader[Any]:
    """torch's loader with the options of a Determined loader, another batch sampler, and seeded workers."""
    clone = copy.copy(loader)
    clone.batch_sampler = sampler
    clone.generator = loader.generator or torch.Generator().manual_seed(seed)
    if loader.num_workers > 0:
        clone.worker_init_fn = functools.partial(start_worker, loader.worker_init_fn)
    made: torch_data.DataLoader[Any] = clone.get_data_loader()
    return made
