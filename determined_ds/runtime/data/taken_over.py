"""Loaders that are not Determined's: taken over where the samples of a step can still be decided here.

Torch's own loader over data with an index says all that Determined's says, so it is read as that one is: the same
samples in a step whatever the replicas, and the same after a resume. Any other loader decides by itself what a replica
sees; it is taken as it is only where the author answers for that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from determined import pytorch
from determined.pytorch import samplers
from torch.utils import data as torch_data

from determined_ds.errors import ConfigError, DataError, Problem
from determined_ds.trial import returned
from determined_ds.trial.stream_loader import StreamLoader, is_stream

OPT_IN = "context.disable_dataset_reproducibility_checks()"
# What trials shard, repeat and resume by, whose loader Determined takes as it is.
OF_TRIALS_THAT_SHARD = (
    samplers.DistributedSampler,
    samplers.DistributedBatchSampler,
    samplers.RepeatSampler,
    samplers.RepeatBatchSampler,
    samplers.SkipSampler,
    samplers.SkipBatchSampler,
)


def build_loader(trial: Any, context: Any, method: str, note: Callable[[str], None]) -> Any:
    """What a trial's method returned, as a loader that can be read.

    Args:
        trial: The trial.
        context: Its context, which knows whether the author answers for a loader of another kind.
        method: ``build_training_data_loader`` or ``build_validation_data_loader``.
        note: Says something to the user.

    Returns:
        Determined's ``DataLoader``, a ``StreamLoader``, or what the author answers for, as it is.

    Raises:
        ConfigError: it is something else.
    """
    loader = returned.loader(trial, method, getattr(trial, method)())
    if isinstance(loader, StreamLoader):
        return loader
    where = f"{type(trial).__name__}.{method}"
    if isinstance(loader, pytorch.DataLoader):
        return _unsplit(loader, where)
    if hasattr(loader, "__iter__") and context._data_repro_checks_disabled:
        note(
            f"data        {where}: {_described(loader)} is taken as it is; splitting it over replicas, shuffling and "
            "resuming it are the trial's own"
        )
        return loader
    if _can_be_taken_over(loader):
        return _unsplit(_as_determineds(loader), where)
    raise ConfigError(_refusal(loader, where, hasattr(trial, "training_loader")))


def _can_be_taken_over(loader: Any) -> bool:
    """Whether a loader does what torch's does, and draws its samples by their index."""
    return (
        isinstance(loader, torch_data.DataLoader)
        and type(loader).__iter__ is torch_data.DataLoader.__iter__
        and type(loader)._get_iterator is torch_data.DataLoader._get_iterator
        and not isinstance(loader.dataset, torch_data.IterableDataset)
        and loader.batch_sampler is not None
    )


def _as_determineds(loader: torch_data.DataLoader[Any]) -> pytorch.DataLoader:
    """The same loader in Determined's words."""
    return pytorch.DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,  # type: ignore[arg-type]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _unsplit(loader: pytorch.DataLoader, where: str) -> pytorch.DataLoader:
    """The loader over all of its samples: it is split over replicas here, and must not be before."""
    batches: Any = loader.batch_sampler
    inner = getattr(batches, "sampler", None)
    if type(batches) is torch_data.BatchSampler and type(inner) is torch_data.DistributedSampler:
        whole: Any = torch_data.RandomSampler if inner.shuffle else torch_data.SequentialSampler
        loader = copy.copy(loader)
        loader.batch_sampler = torch_data.BatchSampler(
            whole(inner.dataset), batches.batch_size, batches.drop_last
        )
        return loader
    for sampler in (batches, inner):
        if _splits(sampler):
            message = (
                "splits, repeats or skips samples by itself, and so would be split over the replicas twice"
            )
            fix = (
                "use a sampler over all samples, which are split and resumed here; or return torch's DataLoader, and "
                f"call {OPT_IN} in __init__"
            )
            raise ConfigError(
                Problem(
                    key=where, value=type(sampler).__name__, message=message, fix=fix, code="loader-sampler"
                )
            )
    return loader


def _splits(sampler: Any) -> bool:
    replicas = getattr(sampler, "num_replicas", 1)
    return isinstance(sampler, OF_TRIALS_THAT_SHARD) or (isinstance(replicas, int) and replicas > 1)


def _described(loader: Any) -> str:
    kind = type(loader)
    name = "torch's DataLoader" if kind is torch_data.DataLoader else kind.__name__
    dataset = getattr(loader, "dataset", None)
    return name if dataset is None else f"{name} over {type(dataset).__name__}"


def _refusal(loader: Any, where: str, has_training_loader: bool) -> Problem:
    dataset = getattr(loader, "dataset", loader)
    if has_training_loader:
        own = "self.training_loader(dataset)" if "training" in where else "self.validation_loader(dataset)"
    elif is_stream(dataset):
        own = "determined_ds.StreamLoader(dataset, batch_size=context.get_train_micro_batch_size_per_gpu())"
    else:
        own = (
            "determined.pytorch.DataLoader(dataset, batch_size=context.get_train_micro_batch_size_per_gpu())"
        )
    message, fix = f"returned {_described(loader)}, which is not a data loader", f"return {own}"
    if hasattr(loader, "__iter__"):
        message = (
            f"returned {_described(loader)}, which decides by itself what a replica sees: {_why(loader)}, and it "
            "would not resume where it stopped"
        )
        fix += f"; or call {OPT_IN} in __init__, if the loader gives each replica its own micro-batches"
    return Problem(key=where, message=message, fix=fix, code="loader-kind")


def _why(loader: Any) -> str:
    if isinstance(getattr(loader, "dataset", None), torch_data.IterableDataset):
        return "every replica would read the same samples"
    if isinstance(loader, torch_data.DataLoader) and loader.batch_sampler is None:
        return "its dataset makes the batches (batch_size=None), which cannot be cut again"
    return "every replica might be given the same samples"


def check_apart(loader: Any, validation_dataset: Any) -> None:
    """Refuse a dataset with a place of its own that is read for training and for validation.

    Args:
        loader: For training, as it can be read.
        validation_dataset: What is validated on; None where it is not known.

    Raises:
        ConfigError: it is one object, and has a state.
    """
    dataset = getattr(loader, "dataset", None)
    if isinstance(loader, StreamLoader) and dataset is validation_dataset and hasattr(dataset, "state_dict"):
        raise ConfigError(
            Problem(
                key=loader.name,
                message="is read for training and for validation, and keeps one place: a validation would move it",
                fix="give each its own: build the dataset twice",
                code="stream-shared",
            )
        )


class GivenBatches:
    """The micro-batches of a loader that is taken as it is, again and again.

    Args:
        loader: It can be iterated again and again; the author answers for its shards.
        skip: Micro-batches that were trained already.
        place: What a checkpoint holds of it: with a ``state_dict`` of the loader's own nothing is skipped.
    """

    def __init__(self, loader: Any, *, skip: int, place: Mapping[str, Any]) -> None:
        self._loader = loader
        self._batches = self._forever()
        if "loader" in place and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(place["loader"])
            return
        for _ in range(skip):
            next(self._batches)

    def _forever(self) -> Iterator[Any]:
        empty = 0
        while empty < 2:  # a loader that goes on from the end of its data may be empty once
            empty += 1
            for batch in self._loader:
                empty = 0
                yield batch
        raise DataError(
            Problem(
                key=type(self._loader).__name__,
                message="the data loader yields no batch",
                fix="use more data, or make iter() begin anew each time",
                code="too-little-data",
            )
        )

    def __iter__(self) -> GivenBatches:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, as torchdata's ``StatefulDataLoader`` has one."""
        has_state = hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict")
        return {"loader": self._loader.state_dict()} if has_state else {}
