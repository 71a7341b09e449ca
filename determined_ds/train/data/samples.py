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


def _indexed(
    loader: pytorch.DataLoader, batch: Batch, replica: int, seed: int, start_batch: int, manual: bool
) -> TrainingData:
    """Data with an index: of the micro-batches of the global stream, every ``replicas``-th is this replica's."""
    batches: Any = loader.batch_sampler
    sampler, size = batches, 1  # a batch sampler of its own yields whole micro-batches
    is_cut = type(batches) is torch_data.BatchSampler
    if is_cut:
        batch, sampler = _split(batches.batch_size, batch, manual), batches.sampler
        size = batch.micro_batch_size
    try:
        length = len(sampler)
    except TypeError:
        message, name = (
            "the sampler has no len(): how many samples an epoch has is not known",
            type(sampler).__name__,
        )
        problem = Problem(
            key=METHOD, value=name, message=message, fix="give it a __len__", code="loader-sampler"
        )
        raise ConfigError(problem) from None
    per_step = batch.accumulation * batch.replicas
    _check_enough(length, "samples" if is_cut else "micro-batches", per_step * size)
    per_epoch = length // (per_step * size)
    is_random = isinstance(sampler, torch_data.RandomSampler) and not sampler.replacement
    is_shuffle = is_random and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]

    def order_of(epoch: int) -> list[Any]:
        if is_shuffle:  # a function of the seed and the epoch alone
            generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
            return torch.randperm(length, generator=generator).tolist()
        count = per_epoch * per_step * size
        with drawn_for(sampler, seed, epoch):
            found = list(itertools.islice(sampler, count))
        if len(found) < count:
            message = f"the sampler yielded {len(found)}, and its len() is {length}"
            fix, name = "have __len__ return what it yields in an epoch", type(sampler).__name__
            raise DataError(Problem(key=name, message=message, fix=fix, code="loader-sampler"))
        return found

    def micro_batches() -> Iterator[Any]:
        epoch, first = divmod(start_batch, per_epoch)
        while True:
            order = order_of(epoch)
            for index in range(first * per_step + replica, per_epoch * per_step, batch.replicas):
                yield order[index * size : (index + 1) * size] if is_cut else order[index]
            epoch, first = epoch + 1, 0

    indices: Iterator[Any] = micro_batches()
    if loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.dataset = SeededDataset(loader.dataset)
        indices = seeded(indices, first=start_batch * batch.accumulation, replica=replica, seed=seed)
    read = with_batch_sampler(loader, indices, seed + start_batch)
    return TrainingData(batches=iter(read), batches_per_epoch=per_epoch)
