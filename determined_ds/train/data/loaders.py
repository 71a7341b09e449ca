"""What ``build_training_data_loader`` and ``build_validation_data_loader`` may return besides Determined's loader.

torch's own loader over data with an index is read like Determined's: the same samples in a step for any number of
replicas, and the same after a resume. Any other loader decides by itself what a replica sees; it is used as it is, and
only where the author takes responsibility for that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from determined import pytorch
from determined.pytorch import samplers
from torch.utils import data as torch_data

from determined_ds.errors import NOT_GIVEN, DataError, Problem
from determined_ds.rundir.signals import die_with_parent
from determined_ds.trial.returned import refused
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
    if not isinstance(loader, pytorch.DataLoader):
        dataset = getattr(loader, "dataset", loader)
        named = type(loader).__name__ + (f" over {type(dataset).__name__}" if dataset is not loader else "")
        if hasattr(loader, "__iter__") and context._data_repro_checks_disabled:
            note(f"data        {where}: {named} is used as it is; the trial splits, shuffles and resumes it")
            return loader
        is_own = isinstance(loader, own) and type(loader).__iter__ is own.__iter__
        if not is_own or loader.batch_sampler is None or is_stream(dataset):
            message = f"returned {named}, which is no data loader that can be split and resumed here: every replica "
            message += "would read the same samples"
            kind = "StreamLoader" if is_stream(dataset) else "DataLoader"
            fix = f"return {kind}(dataset, batch_size=context.get_train_micro_batch_size_per_gpu())"
            if hasattr(trial, "training_loader"):
                fix = f"return self.{'training' if 'training' in where else 'validation'}_loader(dataset)"
            fix += f"; or call {OPT_IN} in __init__, if the loader gives each replica its own micro-batches"
            raise refused(where, message, fix, "loader-kind")
        options = {name: getattr(loader, name) for name in ("batch_sampler", *OPTIONS)}
        loader = pytorch.DataLoader(loader.dataset, **options)
    # Split over replicas here, and not before; Determined's samplers are for who shards, repeats and skips by itself.
    batches: Any = loader.batch_sampler
    for sampler in (batches, getattr(batches, "sampler", None)):
        is_theirs = type(sampler).__module__ == samplers.__name__
        if is_theirs or getattr(sampler, "num_replicas", 1) not in (1, None):
            message = "splits, repeats or skips samples itself, and so would be split over the replicas twice"
            fix = f"use a sampler over all samples, such as shuffle=True; or call {OPT_IN} in __init__"
            raise refused(where, message, fix, "loader-sampler", value=type(sampler).__name__)
    return loader


def too_little(key: str, message: str, fix: str = "use more data", *, value: Any = NOT_GIVEN) -> DataError:
    """The error of data that does not make a batch."""
    return DataError(Problem(key=key, value=value, message=message, fix=fix, code="too-little-data"))


def has_state(part: Any) -> bool:
    """Whether something can save its state and load it again."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


@contextlib.contextmanager
def drawn_for(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """What a sampler draws in here is the same on every rank, and again on every resume.

    Seeds torch's global generator, and the generator of the sampler and of those that it wraps, as torch's have.
    """
    epoch_seed = (seed * 1_000_003 + epoch) % 2**63
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(epoch_seed)
        while sampler is not None:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            if isinstance(own := getattr(sampler, "generator", None), torch.Generator):
                own.manual_seed(epoch_seed)
            sampler = getattr(sampler, "sampler", None)
        yield


def with_batch_sampler(
    loader: pytorch.DataLoader, sampler: Any, seed: int, dataset: Any = None
) -> torch_data.DataLoader[Any]:
    """torch's loader with the options of a Determined loader, another batch sampler or dataset, and seeded workers."""
    options = {name: getattr(loader, name) for name in OPTIONS}
    options["generator"] = loader.generator or torch.Generator().manual_seed(seed)
    options["worker_init_fn"] = functools.partial(start_worker, loader.worker_init_fn)
    chosen = loader.dataset if dataset is None else dataset
    return torch_data.DataLoader(chosen, batch_sampler=sampler, **options)


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """What a worker process begins with: it ends with its rank, and calls the author's ``worker_init_fn``."""
    die_with_parent()
    if init is not None:
        init(worker)


def moved(data: Any, device: torch.device) -> Any:
    """A batch on a device, as ``determined.pytorch.to_device`` moves it; named tuples stay named tuples."""
    if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":  # the kinds of types that torch has
        data = torch.from_numpy(data)
    if isinstance(data, torch.Tensor):
        # From pinned memory the host does not wait for the copy; later work of a GPU comes after it anyway.
        return data.to(device, non_blocking=device.type == "cuda")
    if callable(getattr(data, "to", None)):  # such as a packed sequence, whose batch sizes stay on the host
        return data.to(device)
    if isinstance(data, dict):
        return {key: moved(value, device) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        values = [moved(value, device) for value in data]
        if hasattr(data, "_fields"):
            return type(data)(*values)
        return tuple(values) if isinstance(data, tuple) else values
    return data
