"""What ``build_training_data_loader`` and ``build_validation_data_loader`` may return besides Determined's loader.

torch's own loader over data with an index is read like Determined's: the same samples in a step for any number of
replicas, and the same after a resume. Any other loader decides by itself what a replica sees; it is used as it is, and
only where the author takes responsibility for that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from determined import pytorch
from determined.pytorch import samplers
from torch.utils import data as torch_data

from determined_ds.errors import ConfigError, DataError, Problem
from determined_ds.rundir.signals import die_with_parent
from determined_ds.train.data.seeds import seed_everything
from determined_ds.trial.stream_loader import StreamLoader, is_stream

OPT_IN = "context.disable_dataset_reproducibility_checks()"
# What torch's loader and Determined's have alike.
OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)


def build_loader(trial: Any, context: Any, method: str, note: Callable[[str], None]) -> Any:
    """Call a trial's method, and make its result a loader that can be read here."""
    loader = getattr(trial, method)()
    where, own = f"{type(trial).__name__}.{method}", torch_data.DataLoader
    if isinstance(loader, StreamLoader):
        return loader
    if isinstance(loader, pytorch.DataLoader):
        return _unsplit(loader, where)
    if hasattr(loader, "__iter__") and context._data_repro_checks_disabled:
        note(
            f"data        {where}: {_described(loader)} is used as it is; the trial splits, shuffles and resumes it"
        )
        return loader
    is_own = isinstance(loader, own) and type(loader).__iter__ is own.__iter__
    if is_own and loader.batch_sampler is not None and not is_stream(loader.dataset):
        options = {name: getattr(loader, name) for name in ("batch_sampler", *OPTIONS)}
        return _unsplit(pytorch.DataLoader(loader.dataset, **options), where)
    kind = "determined_ds.StreamLoader" if is_stream(getattr(loader, "dataset", loader)) else "DataLoader"
    fix = f"return {kind}(dataset, batch_size=context.get_train_micro_batch_size_per_gpu())"
    if hasattr(trial, "training_loader"):
        fix = f"return self.{'training' if 'training' in where else 'validation'}_loader(dataset)"
    message = f"returned {_described(loader)}, which is not a data loader"
    if hasattr(loader, "__iter__"):
        message = (
            f"returned {_described(loader)}, which decides by itself what a replica sees: every replica would read "
            "the same samples, and it would not resume where it stopped"
        )
        fix += f"; or call {OPT_IN} in __init__, if the loader gives each replica its own micro-batches"
    raise ConfigError(Problem(key=where, message=message, fix=fix, code="loader-kind"))


def _unsplit(loader: pytorch.DataLoader, where: str) -> pytorch.DataLoader:
    """The loader over all of its samples: it is split over replicas here, and must not be before."""
    batches: Any = loader.batch_sampler
    for sampler in (batches, getattr(batches, "sampler", None)):
        # Determined's samplers are for trials that shard, repeat and skip by themselves.
        is_theirs, replicas = (
            type(sampler).__module__ == samplers.__name__,
            getattr(sampler, "num_replicas", 1),
        )
        if is_theirs or replicas not in (1, None):
            message = "splits, repeats or skips samples itself, and so would be split over the replicas twice"
            fix = f"use a sampler over all samples, such as shuffle=True; or call {OPT_IN} in __init__"
            kind = type(sampler).__name__
            raise ConfigError(Problem(key=where, value=kind, message=message, fix=fix, code="loader-sampler"))
    return loader


def _described(loader: Any) -> str:
    kind, dataset = type(loader), getattr(loader, "dataset", None)
    name = "torch's DataLoader" if kind is torch_data.DataLoader else kind.__name__
    return name if dataset is None else f"{name} over {type(dataset).__name__}"


# ------------------------------------------------------------------------------------ reading


def has_state(part: Any) -> bool:
    """Whether something can save its state and load it again."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


@contextlib.contextmanager
def drawn_for(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """What a sampler draws in here is the same on every rank, and again on every resume.

    Seeds torch's global generator, and the generator of the sampler or of one that it batches, as torch's have.
    """
    epoch_seed = (seed * 1_000_003 + epoch) % 2**63
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(epoch_seed)
        inner: Any = getattr(sampler, "sampler", None)
        for each in (sampler, inner):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
            if isinstance(own := getattr(each, "generator", None), torch.Generator):
                own.manual_seed(epoch_seed)
        yield


def with_batch_sampler(
    loader: pytorch.DataLoader, sampler: Any, seed: int, dataset: Any = None
) -> torch_data.DataLoader[Any]:
    """torch's loader with the options of a Determined loader, another batch sampler or dataset, and seeded workers."""
    options = {name: getattr(loader, name) for name in OPTIONS}
    options["generator"] = loader.generator or torch.Generator().manual_seed(seed)
    if loader.num_workers > 0:
        options["worker_init_fn"] = functools.partial(start_worker, loader.worker_init_fn)
    chosen = loader.dataset if dataset is None else dataset
    return torch_data.DataLoader(chosen, batch_sampler=sampler, **options)


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker process: it ends with its rank, and calls the author's ``worker_init_fn``."""
    die_with_parent()
    if init is not None:
        init(worker)


class SeededDataset(torch_data.Dataset[Any]):
    """A map-style dataset whose micro-batches are each made under a seed, which comes with their indices."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: tuple[int, list[int]]) -> list[Any]:
        seed, indices = batch
        seed_everything(seed)
        at_once = getattr(self._dataset, "__getitems__", None)
        return list(at_once(indices)) if at_once else [self._dataset[index] for index in indices]


class GivenBatches:
    """The micro-batches of a loader that is used as it is, again and again."""

    def __init__(self, loader: Any, *, skip: int, place: Mapping[str, Any]) -> None:
        self._loader, self._batches = loader, self._forever()
        self.apart = (_described(loader), True) if has_state(loader) else None
        if self.apart and "loader" in place:
            loader.load_state_dict(place["loader"])
            return
        for _ in range(skip):
            next(self._batches)

    def _forever(self) -> Iterator[Any]:
        empty = 0
        while empty < 2:  # a loader that was resumed at the end of its data may be empty once
            empty += 1
            for batch in self._loader:
                empty = 0
                yield batch
        message, fix = "the data loader yields no batch", "use more data, or make iter() begin anew each time"
        key = type(self._loader).__name__
        raise DataError(Problem(key=key, message=message, fix=fix, code="too-little-data"))

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state, such as that of torchdata's ``StatefulDataLoader``."""
        return {"loader": self._loader.state_dict()} if self.apart else {}
