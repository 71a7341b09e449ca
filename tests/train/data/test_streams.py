"""A stream is one for all replicas, read on where a run stopped; what cannot be read so is refused with the fix."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds import StreamLoader
from tests.package import training_data
from tests.train.data.datasets import ByEpoch, ByWorker, Count, Placed, Shuffled, Split, taken


def opened(dataset: Any, split: Split, *, workers: int = 0, sharded: bool = False, **more: Any) -> Any:
    """A replica's training data."""
    return training_data(StreamLoader(dataset, split[2], num_workers=workers, sharded=sharded), split, **more)


@pytest.mark.parametrize(("kind", "workers"), [(Shuffled, 0), (Shuffled, 2), (ByWorker, 2)])
def test_workers_change_nothing(kind: Any, workers: int) -> None:
    """A dataset that splits itself by worker is read once, and one that draws its order is read in one order."""
    expected = taken(opened(kind(20), (1, 1, 8)), (1, 1, 8), 6)
    split, replicas = (2, 2, 2), []
    for replica in range(2):
        torch.manual_seed(replica), random.seed(workers), np.random.seed(workers)
        replicas.append(taken(opened(kind(20), split, workers=workers, replica=replica), split, 6))
    found = [sorted(first + second) for first, second in zip(*replicas, strict=True)]
    assert found == [sorted(step) for step in expected]
    assert len({tuple(step) for step in expected[:5]}) == 5, "passes draw differently"


def test_a_sharded_stream_is_each_replicas_own() -> None:
    split = (2, 2, 2)
    shares = []
    for replica in range(2):
        own = range(replica, 12, 2)
        shares.append(taken(opened(own.__iter__, split, sharded=True, replica=replica), split, 2))
    assert shares == [[[0, 2, 4, 6], [8, 10, 0, 2]], [[1, 3, 5, 7], [9, 11, 1, 3]]]


@pytest.mark.parametrize(
    ("kind", "workers", "stop"), [(Shuffled, 2, 5), (Placed, 2, 5), (Placed, 2, 9), (ByEpoch, 0, 5)]
)
def test_resumed_it_goes_on_as_if_never_stopped(kind: Any, workers: int, stop: int) -> None:
    """In a pass, at its very end (batch 5 of 20 samples), and in a later one; with other workers than before."""
    split = (2, 2, 1)
    for replica in range(2):
        whole = taken(opened(kind(20), split, workers=workers, replica=replica), split, 12)
        before = opened(kind(20), split, workers=workers, replica=replica)
        taken(before, split, stop)
        position = before.state_dict()
        for other in {workers, 0}:
            after = opened(kind(20), split, workers=other, replica=replica, start=stop, position=position)
            assert after.state_dict()["samples"] == position["samples"], "nothing is taken yet"
            assert taken(after, split, 12 - stop) == whole[stop:]


def test_a_stream_that_many_readers_read_whole_is_warned_of() -> None:
    """Two replicas, each with so many workers."""
    for workers, sharded in ((4, False), (1, False), (4, True)):
        notes = list[str]()
        opened(Count(64), (2, 1, 2), workers=workers, sharded=sharded, note=notes.append)
        warned = [note for note in notes if "every sample of Count is read 8 times" in note]
        assert len(warned) == (workers == 4 and not sharded)
