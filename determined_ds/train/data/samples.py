"""Which samples a rank trains on, and when.

Training is one global stream of samples, epoch after epoch, cut into global batches; a replica takes its share of each.
So an optimizer step has the same samples for any split into replicas and micro-batches, and a position in the stream
is one number. Determined 0.38.1 shards and skips by micro-batches instead, which depends on both.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.config.layout import Batch
from determined_ds.errors import ConfigError, DataError, Problem
from determined_ds.train.data.loaders import GivenBatches, drawn_for, epoch_seed, with_batch_sampler
from determined_ds.train.data.seeds import SeededDataset, seeded
from determined_ds.train.data.streams import FirstRow, TrainingStream
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
        loader: What ``build_loader`` has made of the trial's: a Determined ``DataLoader``, a ``StreamLoader``, or
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
        per_batch = batch.global_batch_size // (batch.replicas if loader.sharded else 1)
        length = loader.length()
        if length is not None:
            _check_enough(length, "samples", per_batch)
        if start_batch and not place:  # of a checkpoint that was written before streams were supported
            place = {"samples": start_batch * per_batch}
        stream = TrainingStream(
            loader, batch, replica=replica, seed=seed, start_batch=start_batch, place=place, note=note
        )
        per_epoch = None if length is None else length // per_batch
        return TrainingData(batches=stream, batches_per_epoch=per_epoch, place=stream, first=stream.first)
    if isinstance(loader, pytorch.DataLoader):
        return _indexed(loader, batch, replica, seed, start_batch, manual)
    given = GivenBatches(loader, skip=start_batch * batch.accumulation, place=place)
    try:
        num_batches = len(loader)
    except (TypeError, NotImplementedError):
        per_epoch = None
    else:
        _check_enough(num_batches, "micro-batches", batch.accumulation)
        per_epoch = num_batches // batch.accumulation
    return TrainingData(batches=given, batches_per_epoch=per_epoch, place=given)


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


def _check_enough(have: int, what: str, need: int) -> None:
    if have < need:
        message = f"the training data has {have} {what}, less than one global batch of {need}"
        fix = f"use more data, or a global batch of at most {have} {what}"
        key = "hyperparameters.global_batch_size"
        raise DataError(Problem(key=key, value=need, message=message, fix=fix, code="too-little-data"))


# ------------------------------------------------------------------------------------ data with an index


def _indexed(
    loader: pytorch.DataLoader, batch: Batch, replica: int, seed: int, start_batch: int, manual: bool
) -> TrainingData:
    """Data with an index: of the micro-batches of the global stream, every ``replicas``-th is this replica's."""
    batches: Any = loader.batch_sampler
    drawn: Callable[[int], list[Any]]
    if type(batches) is torch_data.BatchSampler:
        batch, sampler = _split(batches.batch_size, batch, manual), batches.sampler
        num_samples, size = _length_of(sampler), batch.micro_batch_size
        _check_enough(num_samples, "samples", batch.global_batch_size)
        count = num_samples // size
        drawn = _epoch_order(sampler, num_samples, len(loader.dataset), seed)  # type: ignore[arg-type]
    else:
        count, size = len(batches), None
        _check_enough(count, "micro-batches", batch.accumulation * batch.replicas)

        def drawn(epoch: int) -> list[Any]:
            return _drawn(batches, per_epoch * per_step, count, seed, epoch)

    per_step = batch.accumulation * batch.replicas
    per_epoch = count // per_step

    def micro_batches() -> Iterator[Any]:
        epoch, first = divmod(start_batch, per_epoch)
        while True:
            order = drawn(epoch)
            for index in range(first * per_step + replica, per_epoch * per_step, batch.replicas):
                yield order[index] if size is None else order[index * size : (index + 1) * size]
            epoch, first = epoch + 1, 0

    indices: Iterator[Any] = micro_batches()
    if loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.dataset = SeededDataset(loader.dataset)
        indices = seeded(indices, first=start_batch * batch.accumulation, replica=replica, seed=seed)
    read = with_batch_sampler(loader, indices, seed + start_batch)
    return TrainingData(batches=iter(read), batches_per_epoch=per_epoch)


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        message = "the sampler has no len(): how many samples an epoch has is not known"
        name, fix = type(sampler).__name__, "give it a __len__"
        problem = Problem(key=METHOD, value=name, message=message, fix=fix, code="loader-sampler")
        raise ConfigError(problem) from None


def _epoch_order(sampler: Any, num_samples: int, size: int, seed: int) -> Callable[[int], list[int]]:
    """The order of an epoch's samples, as a function of its number alone where possible."""
    is_random = isinstance(sampler, torch_data.RandomSampler)
    if is_random and not sampler.replacement and sampler.num_samples == size:

        def shuffled(epoch: int) -> list[int]:
            generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
            return torch.randperm(num_samples, generator=generator).tolist()

        return shuffled
    return lambda epoch: _drawn(sampler, num_samples, num_samples, seed, epoch)


def _drawn(sampler: Any, count: int, length: int, seed: int, epoch: int) -> list[Any]:
    """The first ``count`` items of a sampler of length ``length`` in an epoch."""
    with drawn_for(sampler, seed, epoch):
        found = list(itertools.islice(sampler, count))
    if len(found) < count:
        message = f"the sampler yielded {len(found)}, and its len() is {length}"
        fix = "have __len__ return what it yields in an epoch"
        raise DataError(Problem(key=type(sampler).__name__, message=message, fix=fix, code="loader-sampler"))
    return found
