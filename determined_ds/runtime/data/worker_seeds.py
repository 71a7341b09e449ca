"""Random numbers drawn in data-loader workers, as a function of the place in the stream alone.

A worker process has generators of its own, that no checkpoint can hold: they run ahead of training. So each
micro-batch is made under a seed that its number decides, and a resumed run draws what the whole one would have.
Without workers the samples are drawn from the rank's own generators, which a checkpoint does hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils import data as torch_data

from determined_ds.protocol.signals import die_with_parent
from determined_ds.runtime.data.generators import seed_everything


class SeededBatch(list[int]):
    """Indices of a micro-batch, and the seed that it is made under."""

    seed: int = 0


class SeededDataset(torch_data.Dataset[Any]):
    """A dataset whose micro-batches are each made under their own seed.

    Args:
        dataset: Map-style.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: SeededBatch) -> list[Any]:
        seed_everything(indices.seed)
        at_once = getattr(self._dataset, "__getitems__", None)
        return list(at_once(list(indices))) if at_once else [self._dataset[index] for index in indices]


class SeededSampler(torch_data.Sampler[SeededBatch]):
    """The micro-batches of a sampler, numbered and seeded.

    Args:
        batches: Yields the indices of one micro-batch after the other.
        first: Number of the first micro-batch of this replica.
        replica: Data-parallel rank: replicas draw apart.
        seed: The run's.
    """

    def __init__(self, batches: Any, *, first: int, replica: int, seed: int) -> None:
        self._batches = batches
        self._first = first
        self._replica = replica
        self._seed = seed

    def __iter__(self) -> Iterator[SeededBatch]:
        for number, indices in enumerate(self._batches, start=self._first):
            batch = SeededBatch(indices)
            batch.seed = hash((self._seed, self._replica, number)) % 2**32  # of integers: the same everywhere
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


def start_worker(own: Callable[[int], None] | None, worker: int) -> None:
    """In a worker process, as it starts: what the author asked for, and an end with the rank it works for."""
    die_with_parent()
    if own is not None:
        own(worker)
