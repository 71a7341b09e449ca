"""Which samples a rank sees, and when.

Training is one global stream of samples, epoch after epoch, cut into global batches; a replica takes its
share of each. So the samples of an optimizer step are the same however they are split into replicas and
micro-batches, and a position in the stream is one number. Determined 0.38.1 shards and skips by micro-batches
instead, which depends on both.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.config.batch import Batch
from determined_ds.errors import ConfigError, DataError, Problem
from determined_ds.runtime.data.first_rows import FirstRow
from determined_ds.runtime.data.passes import samples_to_skip
from determined_ds.runtime.data.streams import ReplicaStream, TrainingStream
from determined_ds.runtime.data.taken_over import GivenBatches
from determined_ds.runtime.data.worker_seeds import SeededDataset, SeededSampler, start_worker
from determined_ds.runtime.loop.progress import silent
from determined_ds.trial.stream_loader import StreamLoader


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """A rank's endless stream of micro-batches.

    Args:
        batches: The micro-batches, from the batch that training starts at.
        batches_per_epoch: Whole global batches in an epoch. Of data with an index, what is left over is dropped, and
            where the data is shuffled it is another rest each epoch; None for a stream without a length.
        place: Tells the place in it, where that is more than a number of batches.
        first: Of a stream, what was read first.
    """

    batches: Iterator[Any]
    batches_per_epoch: int | None
    place: Any = None
    first: FirstRow | None = None


class DataPlace:
    """The place in the training data that a checkpoint holds, where it is more than a number of batches.

    Attributes:
        found: What a checkpoint held; empty without one.
        of: Of the data that is read, what tells the place; None where the number of batches says all.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.of: Any = None

    def state_dict(self) -> dict[str, Any]:
        return dict(self.of.state_dict()) if self.of is not None else {}

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
    note: Callable[[str], None] = silent,
) -> TrainingData:
    """A rank's share of the training data.

    Args:
        loader: What ``build_training_data_loader`` returned: Determined's, a stream's, or another one, that is taken
            as it is.
        batch: The completed batch.
        replica: Data-parallel rank, 0 .. replicas - 1.
        seed: Of the shuffle; the same on all ranks.
        start_batch: Batches already trained.
        manual: The trial accumulates gradients itself, in batches of the loader's own size.
        place: What a checkpoint holds of the place in the data.
        note: Says something to the user.

    Raises:
        ConfigError: the loader's batch size is not the micro-batch size.
        DataError: there is not one global batch of data.
    """
    place = place or {}
    if isinstance(loader, StreamLoader):
        batch = _split(loader.batch_size, batch, manual)
        return _stream(loader, batch, replica, seed, start_batch, place, note)
    if not isinstance(loader, pytorch.DataLoader):
        given = GivenBatches(loader, skip=start_batch * batch.accumulation, place=place)
        return TrainingData(
            batches=given, batches_per_epoch=_epoch_of_given(loader, batch.accumulation), place=given
        )
    batches = loader.batch_sampler
    if type(batches) is torch_data.BatchSampler:
        num_samples = _length_of(batches.sampler)
        sampler: GlobalSampler | GlobalBatchSampler = GlobalSampler(
            _epoch_order(batches.sampler, num_samples, len(loader.dataset), seed),  # type: ignore[arg-type]
            num_samples=num_samples,
            batch=_split(batches.batch_size, batch, manual),
            replica=replica,
            start_batch=start_batch,
        )
    else:
        sampler = GlobalBatchSampler(
            batches, batch=batch, replica=replica, seed=seed, start_batch=start_batch
        )
    indices: Any = sampler
    if loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.dataset = SeededDataset(loader.dataset)
        first = start_batch * len(sampler) // sampler.batches_per_epoch
        indices = SeededSampler(sampler, first=first, replica=replica, seed=seed)
    torch_loader = with_batch_sampler(loader, indices, seed + start_batch)
    return TrainingData(batches=iter(torch_loader), batches_per_epoch=sampler.batches_per_epoch)


def _stream(
    loader: StreamLoader,
    batch: Batch,
    replica: int,
    seed: int,
    start_batch: int,
    place: Mapping[str, Any],
    note: Callable[[str], None],
) -> TrainingData:
    own_share = batch.replicas if loader.sharded else 1
    per_batch = batch.global_batch_size // own_share
    length = loader.length()
    if length is not None and length < per_batch:
        raise _too_few(length, "samples", per_batch)
    if start_batch and not place:  # of a checkpoint that was written before streams were known
        place = {"samples": start_batch * per_batch}
    skip = samples_to_skip(loader, place) if place else 0
    if skip:
        note(
            f"data        {loader.name} has no state_dict: reading and skipping {skip:,} samples, to go on after "
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


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise ConfigError(
            Problem(
                key="build_training_data_loader",
                value=type(sampler).__name__,
                message="the sampler has no len(): how many samples an epoch has is not known",
                fix="give it a __len__",
                code="loader-sampler",
            )
        ) from None


def _split(size: int | None, batch: Batch, manual: bool) -> Batch:
    """The batch in micro-batches of the loader's own size, if they may have it."""
    size = _checked_batch_size(int(size or 0), batch, manual)
    return Batch(
        global_batch_size=batch.global_batch_size,
        micro_batch_size=size,
        accumulation=batch.global_batch_size // (size * batch.replicas),
        replicas=batch.replicas,
    )


def _checked_batch_size(size: int, batch: Batch, manual: bool) -> int:
    divides = size > 0 and batch.global_batch_size % (size * batch.replicas) == 0
    if size == batch.micro_batch_size or (manual and divides):
        return size
    raise ConfigError(
        Problem(
            key="build_training_data_loader",
            value=size,
            message=f"the data loader's batch_size is not the micro-batch size {batch.micro_batch_size}",
            fix="use self.training_loader(dataset), or batch_size="
            "context.get_train_micro_batch_size_per_gpu()",
            code="loader-batch-size",
        )
    )


def with_batch_sampler(loader: pytorch.DataLoader, sampler: Any, seed: int) -> torch_data.DataLoader[Any]:
    """Determined's loader, made into torch's with another batch sampler, and workers seeded by themselves."""
    clone = copy.copy(loader)
    clone.batch_sampler = sampler
    clone.generator = loader.generator or torch.Generator().manual_seed(seed)
    if loader.num_workers > 0:
        clone.worker_init_fn = functools.partial(start_worker, loader.worker_init_fn)
    made: torch_data.DataLoader[Any] = clone.get_data_loader()
    return made


def _epoch_order(sampler: Any, num_samples: int, size: int, seed: int) -> Callable[[int], list[int]]:
    """The order of an epoch's samples, as a function of its number alone wherever that can be."""
    plain_shuffle = (
        isinstance(sampler, torch_data.RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == size
    )
    if plain_shuffle:

        def shuffled(epoch: int) -> list[int]:
            generator = torch.Generator().manual_seed(_seed_of(seed, epoch))
            return torch.randperm(num_samples, generator=generator).tolist()

        return shuffled

    def as_given(epoch: int) -> list[int]:
        with drawn_for(sampler, seed, epoch):
            order = list(itertools.islice(sampler, num_samples))
        if len(order) < num_samples:
            raise _sampler_too_short(sampler, len(order), num_samples)
        return order

    return as_given


@contextlib.contextmanager
def drawn_for(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """What a sampler draws in here is the same on every rank, and again on every resume.

    Covers torch's global generator, and a generator of the sampler's own or of one that it batches, which is what
    torch's samplers use.
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


class GlobalSampler(torch_data.Sampler[list[int]]):
    """Micro-batches of one replica, cut from the global stream of samples.

    Global batch ``b`` of an epoch is samples ``b*G .. (b+1)*G``; of these, micro-batch ``k`` of replica ``r``
    is the ``k*R + r``-th run of ``m``.
    """

    def __init__(
        self,
        order: Callable[[int], list[int]],
        *,
        num_samples: int,
        batch: Batch,
        replica: int,
        start_batch: int = 0,
    ) -> None:
        self._order = order
        self._batch = batch
        self._replica = replica
        self._start_batch = start_batch
        self.batches_per_epoch = num_samples // batch.global_batch_size
        if not self.batches_per_epoch:
            raise _too_few(num_samples, "samples", batch.global_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        size, replicas = self._batch.micro_batch_size, self._batch.replicas
        epoch, first = divmod(self._start_batch, self.batches_per_epoch)
        while True:
            order = self._order(epoch)
            for index in range(first, self.batches_per_epoch):
                start = index * self._batch.global_batch_size
                for micro in range(self._batch.accumulation):
                    at = start + (micro * replicas + self._replica) * size
                    yield order[at : at + size]
            epoch, first = epoch + 1, 0

    def __len__(self) -> int:
        return self.batches_per_epoch * self._batch.accumulation


class GlobalBatchSampler(torch_data.Sampler[list[int]]):
    """The same over a batch sampler of the author's own: its batches are dealt to the replicas in turn."""

    def __init__(
        self, batches: Any, *, batch: Batch, replica: int, seed: int = 0, start_batch: int = 0
    ) -> None:
        self._batches = batches
        self._seed = seed
        self._batch = batch
        self._replica = replica
        self._start_batch = start_batch
        self._per_step = batch.accumulation * batch.replicas
        self.batches_per_epoch = len(batches) // self._per_step
        if not self.batches_per_epoch:
            raise _too_few(len(batches), "micro-batches", self._per_step)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self._start_batch, self.batches_per_epoch)
        while True:
            expected = self.batches_per_epoch * self._per_step
            with drawn_for(self._batches, self._seed, epoch):
                everything = list(itertools.islice(self._batches, expected))
            if len(everything) < expected:
                raise _sampler_too_short(self._batches, len(everything), len(self._batches))
            yield from everything[first * self._per_step + self._replica :: self._batch.replicas]
            epoch, first = epoch + 1, 0

    def __len__(self) -> int:
        return self.batches_per_epoch * self._batch.accumulation


def _too_few(have: int, what: str, need: int) -> DataError:
    return DataError(
        Problem(
            key="hyperparameters.global_batch_size",
            value=need,
            message=f"the training data has {have} {what}, less than one global batch of {need}",
            fix=f"use more data, or a global batch of at most {have} {what}",
            code="too-little-data",
        )
    )


def _sampler_too_short(sampler: Any, have: int, said: int) -> DataError:
    return DataError(
        Problem(
            key=type(sampler).__name__,
            message=f"the sampler yielded {have}, and its len() is {said}",
            fix="have __len__ return what it yields in an epoch",
            code="loader-sampler",
        )
    )


def _epoch_of_given(loader: Any, accumulation: int) -> int | None:
    try:
        num_batches = len(loader)
    except (TypeError, NotImplementedError):
        return None
    if num_batches < accumulation:
        raise _too_few(num_batches, "micro-batches", accumulation)
    return num_batches // accumulation
