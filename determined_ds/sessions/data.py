"""What a script iterates: passes over the training data, which drive it, and shares of the validation data."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from determined import pytorch
from torch.utils import data as torch_data

from determined_ds.errors import DataError, Problem
from determined_ds.rundir.signals import HEART
from determined_ds.train.data.loaders import drawn_for, with_batch_sampler
from determined_ds.train.data.shares import Share
from determined_ds.train.loop.validation import evaluating
from determined_ds.trial.stream_loader import StreamLoader

if TYPE_CHECKING:
    from determined_ds.sessions.session import Session


class TrainingBatches:
    """The training data of a script: iterate it once for each pass."""

    def __init__(self, session: Session, make: Callable[[], Any], dataset: Any) -> None:
        self._session, self._make, self.dataset = session, make, dataset

    @functools.cached_property
    def loader(self) -> Any:
        """The loader that is read."""
        return self._make()

    @property
    def batch_size(self) -> int:
        """Samples in a micro-batch."""
        return self._session.resolved.batch.micro_batch_size

    def __len__(self) -> int:
        """Micro-batches of this rank in a pass."""
        loader, batch = self.loader, self._session.resolved.batch
        if isinstance(loader, StreamLoader):
            length = loader.length()
            if length is None:
                raise TypeError("the training data has no length, and so has its loader")
            steps = length // (batch.global_batch_size // (batch.replicas if loader.sharded else 1))
        elif type(loader.batch_sampler) is torch_data.BatchSampler:
            steps = len(loader.batch_sampler.sampler) // batch.global_batch_size  # type: ignore[arg-type]
        else:
            steps = len(loader.batch_sampler) // (batch.accumulation * batch.replicas)
        return steps * batch.accumulation

    def __iter__(self) -> Iterator[Any]:
        return self._session._one_pass()


class ValidationData:
    """The validation data of a script: a replica's share of it, as many batches on each.

    Every sample is in one share, so a mean over what all ranks report, weighted by samples, is the mean over all. Data
    without an index, and data with a batch sampler of its own, is read whole by every replica.
    """

    def __init__(self, session: Session, make: Callable[[], Any], dataset: Any) -> None:
        self._session, self._make, self.dataset = session, make, dataset

    def __len__(self) -> int:
        """Batches of this rank."""
        if self._share[1] is None:
            raise TypeError("the validation data has no length, and so has its loader")
        return len(self._share[1])

    def __iter__(self) -> Iterator[Any]:
        session = self._session
        session._trains("iterating the validation loader")
        session._pause()
        batches, sizes = self._share
        pipelines = session.context.models if session.context.use_pipeline_parallel else []
        loads = session.context._mpu.should_build_data_loader
        with evaluating(pipelines) if pipelines else contextlib.nullcontext():
            for engine in pipelines:
                engine.micro_batches = 1
            for number, batch in enumerate(batches):
                HEART.beat()
                session._validated += sizes[number] if sizes is not None else 0
                yield (iter([batch]) if loads else None) if pipelines else batch

    @functools.cached_property
    def _share(self) -> tuple[Any, list[int] | None]:
        """The batches of this replica, and the samples in each, None where that is not known.

        Under ZeRO 3 a forward pass is a collective, so replicas make the same number of them.
        """
        mpu, seed, loader = self._session.context._mpu, self._session.context.get_trial_seed(), self._make()
        has_index = isinstance(loader, pytorch.DataLoader)
        if not (has_index and type(loader.batch_sampler) is torch_data.BatchSampler):
            whole = Share(loader, length_of=len, replica=0, replicas=1, seed=seed)
            return whole, whole.sizes
        with drawn_for(loader.batch_sampler, seed, 0):
            order = [sample for batch in loader.batch_sampler for sample in batch]
        if not order:
            message, fix = "the validation data has no sample", "use more validation data"
            raise DataError(
                Problem(key="s.validation_loader", message=message, fix=fix, code="too-little-data")
            )
        replicas = mpu.data_parallel_world_size if len(order) >= mpu.data_parallel_world_size else 1
        own = order[mpu.data_parallel_rank % replicas :: replicas]
        largest = -(-len(order) // replicas)
        count = min(-(-largest // loader.batch_sampler.batch_size), len(order) // replicas)
        cuts = [len(own) * index // count for index in range(count + 1)]
        batches = [own[start:end] for start, end in itertools.pairwise(cuts)]
        return with_batch_sampler(loader, batches, 0), [len(batch) for batch in batches]
