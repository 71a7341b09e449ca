"""Data whose samples are numbers, and what replicas are given of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data

# Replicas, accumulation, samples in a micro-batch.
Split = tuple[int, int, int]


class Count(torch_data.IterableDataset):
    """A stream of the numbers below ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.size))


class Sized(Count):
    """One that knows how many they are."""

    def __len__(self) -> int:
        return self.size


class Shuffled(Count):
    """In an order, and with noise, of the generators of random, numpy and torch; another one each pass."""

    def __iter__(self) -> Iterator[Any]:
        numbers = list(range(self.size))
        random.shuffle(numbers)
        for number in numbers:
            yield number + float(torch.rand(())) + float(np.random.rand())


class ByWorker(Count):
    """Splits itself by worker, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(range(first, self.size, step))


class Placed(Count):
    """Knows its place: ``state_dict`` as torchdata's ``StatefulDataLoader`` asks for it."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.size:
            self.at += 1
            yield self.at - 1 + float(torch.rand(()))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class ByEpoch(Shuffled):
    """Its order is a function of the epoch that it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            yield 1000 * self.epoch + number


def taken(data: Any, split: Split, steps: int) -> list[list[Any]]:
    """What a replica is given in each of the next steps, of its micro-batches one after the other."""
    batches = [each.tolist() for each in itertools.islice(data.batches, steps * split[1])]
    rows = (batches[i : i + split[1]] for i in range(0, len(batches), split[1]))
    return [list(itertools.chain(*row)) for row in rows]
