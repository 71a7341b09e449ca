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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.config.batch import Batch
from determined_ds.errors import ConfigError, DataError, Problem
from determined_ds.runtime.signals import die_with_parent
from determined_ds.runtime.worker_seeds import SeededDataset, SeededSampler


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """A rank's endless stream of micro-batches.

    Args:
        batches: The micro-batches, from the batch that training starts at.
        batches_per_epoch: Whole global batches in an epoch; what is left over is dropped, and where the data
            is shuffled it is another rest each epoch.
    """

    batches: Iterator[Any]
    batches_per_epoch: int


def training_data(
    loader: Any, *, batch: Batch, replica: int, seed: int, start_batch: int, manual: bool = False
) -> TrainingData:
    """A rank's share of the training data.

    Args:
        loader: What ``build_training_data_loader`` returned.
        batch: The completed batch.
        replica: Data-parallel rank, 0 .. replicas - 1.
        seed: Of the shuffle; the same on all ranks.
        start_batch: Batches already trained.
        manual: The trial accumulates gradients itself, in batches of the loader's own size.

    Raises:
        ConfigError: the loader's batch size is not the micro-batch size.
        DataError: there is not one global batch of data.
    """
    if not isinstance(loader, pytorch.DataLoader):
        return _custom(loader, batch, start_batch)
    if type(loader.batch_sampler) is torch_data.BatchSampler:
        size = _checked_batch_size(loader, batch, manual)
        sampler: GlobalSampler | GlobalBatchSampler = GlobalSampler(
            _epoch_order(loader.sampler, len(loader.dataset), seed),  # type: ignore[arg-type]
            num_samples=len(loader.sampler),  # type: ignore[arg-type]
            batch=Batch(
                global_batch_size=batch.global_batch_size,
                micro_batch_size=size,
                accumulation=batch.global_batch_size // (size * batch.replicas),
                replicas=batch.replicas,
            ),
            replica=replica,
            start_batch=start_batch,
        )
    else:
        sampler = GlobalBatchSampler(
            loader.batch_sampler, batch=batch, replica=replica, seed=seed, start_batch=start_batch
        )
    batches: Any = sampler
    if loader.num_workers > 0:
        loader = copy.copy(loader)
        loader.dataset = SeededDataset(loader.dataset)
        first = start_batch * len(sampler) // sampler.batches_per_epoch
        batches = SeededSampler(sampler, first=first, replica=replica, seed=seed)
    torch_loader = _with_sampler(loader, batches, seed + start_batch)
    return TrainingData(batches=iter(torch_loader), batches_per_epoch=sampler.batches_per_epoch)


def _checked_batch_size(loader: pytorch.DataLoader, batch: Batch, manual: bool) -> int:
    size = int(loader.batch_size or 0)
    if size == batch.micro_batch_size or (manual and batch.global_batch_size % (size * batch.replicas) == 0):
        return size
    raise ConfigError(
        Problem(
            key="build_training_data_loader",
            value=size,
            message=f"the data loader's batch_size is not the micro-batch size {batch.micro_batch_size}",
            mend="use self.training_loader(dataset), or batch_size="
            "context.get_train_micro_batch_size_per_gpu()",
            code="loader-batch-size",
        )
    )


def _with_sampler(loader: pytorch.DataLoader, sampler: Any, seed: int) -> torch_data.DataLoader[Any]:
    """Determined's loader, made into torch's with another batch sampler, and workers seeded by themselves."""
    clone = copy.copy(loader)
    clone.batch_sampler = sampler
    clone.generator = loader.generator or torch.Generator().manual_seed(seed)
    if loader.num_workers > 0:
        clone.worker_init_fn = functools.partial(_start_worker, loader.worker_init_fn)
    made: torch_data.DataLoader[Any] = clone.get_data_loader()
    return made


def _start_worker(own: Callable[[int], None] | None, worker: int) -> None:
    """In a worker process, as it starts: what the author asked for, and an end with the rank it works for."""
    die_with_parent()
    if own is not None:
        own(worker)


def _epoch_order(sampler: Any, num_samples: int, seed: int) -> Callable[[int], list[int]]:
    """The order of an epoch's samples, as a function of its number alone wherever that can be."""
    plain_shuffle = (
        isinstance(sampler, torch_data.RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == num_samples
    )
    if plain_shuffle:

        def shuffled(epoch: int) -> list[int]:
            generator = torch.Generator().manual_seed(_seed_of(seed, epoch))
            return torch.randperm(num_samples, generator=generator).tolist()

        return shuffled

    def as_given(epoch: int) -> list[int]:
        with _drawn_for(sampler, seed, epoch):
            return list(sampler)

    return as_given


@contextlib.contextmanager
def _drawn_for(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """What a sampler draws in here is the same on every rank, and again on every resume.

    Covers torch's global generator, and a generator of the sampler's own, which is what torch's samplers use.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(_seed_of(seed, epoch))
        own = getattr(sampler, "generator", None)
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
            with _drawn_for(self._batches, self._seed, epoch):
                everything = list(itertools.islice(self._batches, self.batches_per_epoch * self._per_step))
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
            mend=f"use more data, or a global batch of at most {have} {what}",
            code="too-little-data",
        )
    )


def _custom(loader: Any, batch: Batch, start_batch: int) -> TrainingData:
    """A loader that is not Determined's: repeated as it is; the author answers for its shards."""
    length = len(loader) // batch.accumulation
    if not length:
        raise _too_few(len(loader), "micro-batches", batch.accumulation)

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches = forever()
    for _ in range(start_batch * batch.accumulation):
        next(batches)
    return TrainingData(batches=batches, batches_per_epoch=length)


class ValidationBatches:
    """A rank's share of the validation data, to the last sample: an iterator that keeps its own accounts.

    All ranks go through the same number of batches, as a forward pass may be collective (ZeRO 3, pipelines).
    A rank that has run out repeats its first batch, with weight 0.

    Attributes:
        remaining: Batches left, padding included; the same on all ranks.
        weights: Samples in each batch taken since :meth:`start_call`; 0 for padding.
    """

    def __init__(self, loader: Any, num_batches: int, length_of: Callable[[Any], int]) -> None:
        self.remaining = num_batches
        self.weights: list[int] = []
        self._length_of = length_of
        self._loader = loader
        self._own_left = loader.num_batches if loader is not None else 0
        self._batches = iter(loader) if loader is not None else None
        self._first: Any = None

    def start_call(self) -> None:
        """Forget the weights of the batches before."""
        self.weights = []

    @property
    def exhausted(self) -> bool:
        """Whether this rank's own batches are used up, and only padding is left."""
        return self._batches is not None and self._own_left == 0

    def __iter__(self) -> ValidationBatches:
        return self

    def __next__(self) -> Any:
        if self.remaining <= 0 or self._batches is None:
            raise StopIteration
        self.remaining -= 1
        if self._own_left:
            self._own_left -= 1
            batch = next(self._batches)
            self.weights.append(self._length_of(batch))
            if self._first is None:
                self._first = batch
            return batch
        self.weights.append(0)
        if self._first is None:
            self._first = next(iter(self._loader.padding))
        return self._first

    def skip(self, count: int) -> None:
        """Count batches that other ranks took; for a rank that has no data loader."""
        self.remaining -= count


class ValidationLoader:
    """The validation batches of one replica: every ``replicas``-th batch of the loader's own order.

    Args:
        loader: What ``build_validation_data_loader`` returned.
        replica: Data-parallel rank.
        replicas: Data-parallel copies.

    Attributes:
        sizes: Samples in each batch, as far as which of them are the same.
    """

    def __init__(self, loader: Any, *, replica: int, replicas: int) -> None:
        if isinstance(loader, pytorch.DataLoader):
            everything = list(loader.batch_sampler or ())
            if not everything:
                raise _no_validation()
            own = everything[replica::replicas]
            self._loader: Any = _with_sampler(loader, own, 0)
            self.padding: Any = _with_sampler(loader, everything[:1], 0)
            self.sizes = [len(samples) for samples in own]
        else:
            if not len(loader):
                raise _no_validation()
            self._loader = self.padding = loader
            # Unknown before they are loaded: all alike but for the last, which is then mixed with no other.
            self.sizes = [2] * (len(loader) - 1) + [1]
        self.num_batches = len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _no_validation() -> DataError:
    return DataError(
        Problem(
            key="build_validation_data_loader",
            message="the validation data has no batch",
            mend="use more validation data, or a loader without drop_last",
            code="too-little-data",
        )
    )
