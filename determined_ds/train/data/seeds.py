"""Random-number generators: seeded alike, saved and restored; in data-loader workers, seeded for each micro-batch.

Workers run ahead of training, so no checkpoint can hold their generators. Each micro-batch is therefore made under a
seed that depends on its number alone, and a resumed run draws what an uninterrupted one would. Without workers,
samples are drawn from the rank's own generators, which a checkpoint holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

from determined_ds.rundir.signals import die_with_parent

SEED = "seed"  # in the state of generators: they begin anew with it
BY_LAYER = "by_layer"  # the layers of pipelines did not draw from them


def mixed_seed(*numbers: int) -> int:
    """One seed from several integers, the same in every process: the hash of integers is not randomized."""
    return hash(numbers) % 2**32


def seed_everything(seed: int, *, cpu_only: bool = False) -> None:
    """Seed random, numpy and torch, the same on every rank; ``cpu_only`` leaves the generators of GPUs alone."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    (torch.random.default_generator.manual_seed if cpu_only else torch.manual_seed)(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator, in types that can be read back without executing anything."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    state: dict[str, Any] = {
        "cpu_rng_state": torch.random.get_rng_state(),
        "np_rng_state": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "random_rng_state": random.getstate(),
        BY_LAYER: True,
    }
    if device.type == "cuda":
        state["gpu_rng_state"] = torch.cuda.get_rng_state(device)
    return state


def are_by_layer(state: Mapping[str, Any]) -> bool:
    """Whether the layers of pipelines are seeded one by one, as in all but older checkpoints.

    Args:
        state: Of :func:`rng_state`, or what a further replica begins with; empty at the start of a training.
    """
    return not state or BY_LAYER in state or SEED in state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set every generator that ``state`` holds; the names are those of Determined's own checkpoints."""
    if SEED in state:
        seed_everything(state[SEED])
    if "cpu_rng_state" in state:
        torch.random.set_rng_state(state["cpu_rng_state"])
    if "np_rng_state" in state:
        name, keys, position, has_gauss, cached = state["np_rng_state"]
        np.random.set_state((name, np.asarray(keys).astype(np.uint32), position, has_gauss, cached))
    if "random_rng_state" in state:
        random.setstate(state["random_rng_state"])
    if device.type == "cuda" and "gpu_rng_state" in state:
        torch.cuda.set_rng_state(state["gpu_rng_state"], device)


# ------------------------------------------------------------------------------------------- in workers


class SeededBatch(list[int]):
    """Indices of a micro-batch, and the seed that it is made under."""

    seed: int = 0


class SeededDataset(torch_data.Dataset[Any]):
    """A map-style dataset whose micro-batches are each made under their own seed."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: SeededBatch) -> list[Any]:
        seed_everything(indices.seed)
        at_once = getattr(self._dataset, "__getitems__", None)
        return list(at_once(list(indices))) if at_once else [self._dataset[index] for index in indices]


class SeededSampler(torch_data.Sampler[SeededBatch]):
    """Numbers the micro-batches of a sampler from ``first``, and seeds each by the run, the replica and its number."""

    def __init__(self, batches: Any, *, first: int, replica: int, seed: int) -> None:
        self._batches = batches
        self._first = first
        self._seeds = seed, replica

    def __iter__(self) -> Iterator[SeededBatch]:
        for number, indices in enumerate(self._batches, start=self._first):
            batch = SeededBatch(indices)
            batch.seed = mixed_seed(*self._seeds, number)
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


def start_worker(init: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker process: it ends with its rank, and calls the author's ``worker_init_fn``."""
    die_with_parent()
    if init is not None:
        init(worker)
