"""Which samples an optimizer step sees depends on the seed and the step: not on ranks, micro-batches or a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from determined.pytorch import DataLoader
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data as torch_data

from determined_ds import StreamLoader
from determined_ds.errors import ConfigError, DataError
from tests.package import training_data
from tests.train.data.datasets import ByEpoch, Count, Placed, Shuffled, Split, numbers, taken


class Rotated(torch_data.Sampler[int]):
    """Starts one further every epoch, as ``set_epoch`` of torch's distributed samplers means it."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return (index % self.size for index in range(self.epoch, self.epoch + self.size))


# How data of a size is read with a micro-batch: by Determined's loader, torch's, samplers of any kind, or as a stream.
KINDS: dict[str, Callable[[int, int], Any]] = {
    "shuffled": lambda size, micro: DataLoader(numbers(size), micro, shuffle=True),
    "in order": lambda size, micro: DataLoader(numbers(size), micro),
    "weighted": lambda size, micro: torch_data.DataLoader(
        numbers(size), micro, sampler=torch_data.WeightedRandomSampler([1.0] * size, size)
    ),
    "subset, own generator": lambda size, micro: torch_data.DataLoader(
        numbers(size),
        micro,
        sampler=torch_data.SubsetRandomSampler(range(size), generator=torch.Generator().manual_seed(99)),
    ),
    "by epoch": lambda size, micro: DataLoader(numbers(size), micro, sampler=Rotated(size)),
    "stream": lambda size, micro: StreamLoader(Shuffled(size), micro),
    "stream with a place": lambda size, micro: StreamLoader(Placed(size), micro),
    "stream by epoch": lambda size, micro: StreamLoader(ByEpoch(size), micro),
}
GLOBAL = 12
SPLITS = st.sampled_from(
    [
        (replicas, GLOBAL // (replicas * micro), micro)
        for replicas in (1, 2, 3, 4)
        for micro in (1, 2, 3)
        if GLOBAL % (replicas * micro) == 0
    ]
)


@pytest.mark.parametrize("kind", KINDS)
@given(
    legs=st.lists(st.tuples(SPLITS, st.integers(1, 4)), min_size=1, max_size=4),
    size=st.integers(GLOBAL, 4 * GLOBAL),
)
def test_any_sequence_of_ranks_and_micro_batches_trains_the_same_samples(
    kind: str, legs: list[tuple[Split, int]], size: int
) -> None:
    """Stopped and resumed between the legs: each is a split of the same global batch, and optimizer steps."""
    found: list[list[Any]] = []
    position: dict[str, Any] = {}
    for split, steps in legs:
        start, after = len(found), []
        found += [[] for _ in range(steps)]
        for replica in range(split[0]):
            torch.manual_seed(start + replica)
            loader = KINDS[kind](size, split[2])
            data = training_data(loader, split, replica=replica, start=start, position=position)
            for step, samples in enumerate(taken(data, split, steps)):
                found[start + step] += samples
            after.append(data.state_dict())
        position = after[-1]  # any replica's is that of all
    whole = (1, 1, GLOBAL)
    expected = taken(training_data(KINDS[kind](size, GLOBAL), whole), whole, len(found))
    assert [sorted(samples) for samples in found] == [sorted(samples) for samples in expected]
    if "stream" not in kind:
        per_epoch = size // GLOBAL
        for first in range(0, len(expected) - per_epoch + 1, per_epoch):
            epoch = [sample for step in expected[first : first + per_epoch] for sample in step]
            assert kind == "weighted" or len(set(epoch)) == len(epoch) == per_epoch * GLOBAL


def micro_batches(loader: Any, split: Split, steps: int, **more: Any) -> list[list[int]]:
    """What a replica is given, micro-batch by micro-batch."""
    batches = training_data(loader, split, **more).batches
    return [next(batches).tolist() for _ in range(steps * split[1])]


def test_the_order_within_a_batch_is_the_same_every_time_with_workers_too() -> None:
    """And to draw it leaves the generators of training alone, whatever draws it."""
    split = (2, 2, 3)
    first = micro_batches(DataLoader(numbers(40), 3, shuffle=True), split, 7, replica=1)
    helped = DataLoader(numbers(40), 3, shuffle=True, num_workers=2)
    assert micro_batches(helped, split, 5, replica=1, start=2) == first[4:]
    sampler = torch_data.WeightedRandomSampler([1.0] * 8, 8)
    drawn = []
    for loader in (DataLoader(numbers(8), 4), DataLoader(numbers(8), 4, sampler=sampler)):
        torch.manual_seed(3)
        micro_batches(loader, (1, 1, 4), 5)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]


def test_epochs_and_seeds_are_shuffled_differently_and_leave_another_rest_each_epoch() -> None:
    split = (1, 1, 20)
    first, second = micro_batches(DataLoader(numbers(20), 20, shuffle=True), split, 2)
    (other_seed,) = micro_batches(DataLoader(numbers(20), 20, shuffle=True), split, 1, seed=8)
    assert sorted(first) == sorted(second) == sorted(other_seed) == list(range(20))
    assert len({tuple(first), tuple(second), tuple(other_seed), tuple(range(20))}) == 4
    steps = micro_batches(DataLoader(numbers(7), 4, shuffle=True), (1, 1, 4), 30)
    assert {sample for step in steps for sample in step} == set(range(7))


def test_a_batch_sampler_is_dealt_out_to_the_replicas_in_turn() -> None:
    split = (2, 2, 2)
    own = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9], [10, 11], [12], [13]]  # two steps, and one left over
    loader = DataLoader(numbers(14), batch_sampler=own)  # type: ignore[arg-type]
    assert micro_batches(loader, split, 3, replica=0) == [[0], [3, 4, 5], [7, 8], [10, 11], [0], [3, 4, 5]]
    assert micro_batches(loader, split, 3, replica=1) == [[1, 2], [6], [9], [12], [1, 2], [6]]
    assert micro_batches(loader, split, 2, replica=1, start=1) == [[9], [12], [1, 2], [6]]


class Short(torch_data.Sampler[int]):
    """It yields less than it says."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 16


@pytest.mark.parametrize(
    ("loader", "error", "said"),
    [
        (DataLoader(numbers(16), 4, sampler=Short()), DataError, "yielded 10, and its len.* is 16"),
        (DataLoader(numbers(15), 4), DataError, "15 samples.*one global batch of 16"),
        (DataLoader(numbers(3), batch_sampler=[[0], [1], [2]]), DataError, "3 micro-batches"),  # type: ignore[arg-type]
        (DataLoader(numbers(100), 16), ConfigError, "16.*micro-batch size 4"),
        (StreamLoader(lambda: iter(range(99)), 16), ConfigError, "16.*micro-batch size 4"),
        (StreamLoader(Count(0), 4), DataError, "yielded 0 samples"),
        (StreamLoader(Count(15), 4), DataError, "yielded 15 samples in pass 1, and one batch needs 16"),
    ],
)
def test_less_than_a_global_batch_and_another_micro_batch_are_refused(
    loader: Any, error: type[ConfigError], said: str
) -> None:
    with pytest.raises(error, match=said):
        micro_batches(loader, (2, 2, 4), 1)
