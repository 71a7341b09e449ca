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
from tests.train.data.datasets import ByEpoch, Count, Placed, Shuffled, Split, taken


class Rotated(torch_data.Sampler[int]):
    """Starts one further every epoch, as ``set_epoch`` of torch's distributed samplers means it."""

    epoch = 0

    def __init__(self, size: int, said: int | None = None) -> None:
        self.size, self.said = size, said or size  # which may be wrong

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        return (index % self.size for index in range(self.epoch, self.epoch + self.size))


def loader(size: int, micro: int | None = None, **how: Any) -> Any:
    """Determined's, over the numbers below ``size``."""
    return DataLoader(range(size), **({"batch_size": micro} if micro else {}), **how)  # type: ignore[arg-type]


def weighted(size: int) -> Any:
    return torch_data.WeightedRandomSampler([1.0] * size, size)


def subset(size: int) -> Any:
    return torch_data.SubsetRandomSampler(range(size), generator=torch.Generator().manual_seed(99))


# How data of a size is read with a micro-batch: by Determined's loader, torch's, samplers of any kind, or as a stream.
KINDS: dict[str, Callable[[int, int], Any]] = {
    "shuffled": lambda size, micro: loader(size, micro, shuffle=True),
    "weighted": lambda size, micro: torch_data.DataLoader(range(size), micro, sampler=weighted(size)),  # type: ignore
    "own generator": lambda size, micro: torch_data.DataLoader(range(size), micro, sampler=subset(size)),  # type: ignore
    "by epoch": lambda size, micro: loader(size, micro, sampler=Rotated(size)),
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
        start = len(found)
        found += [[] for _ in range(steps)]
        for replica in range(split[0]):
            torch.manual_seed(start + replica)
            read = KINDS[kind](size, split[2])
            data = training_data(read, split, replica=replica, start=start, position=position)
            for step, samples in enumerate(taken(data, split, steps)):
                found[start + step] += samples
        position = data.state_dict()  # any replica's is that of all
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
    first = micro_batches(loader(40, 3, shuffle=True), split, 7, replica=1)
    helped = loader(40, 3, shuffle=True, num_workers=2)
    assert micro_batches(helped, split, 5, replica=1, start=2) == first[4:]
    drawn = []
    for each in (loader(8, 4), loader(8, 4, sampler=weighted(8))):
        torch.manual_seed(3)
        micro_batches(each, (1, 1, 4), 5)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]


def test_epochs_and_seeds_are_shuffled_differently_and_leave_another_rest_each_epoch() -> None:
    split = (1, 1, 20)
    first, second = micro_batches(loader(20, 20, shuffle=True), split, 2)
    (other_seed,) = micro_batches(loader(20, 20, shuffle=True), split, 1, seed=8)
    assert sorted(first) == sorted(second) == sorted(other_seed) == list(range(20))
    assert len({tuple(first), tuple(second), tuple(other_seed), tuple(range(20))}) == 4
    steps = micro_batches(loader(7, 4, shuffle=True), (1, 1, 4), 30)
    assert {sample for step in steps for sample in step} == set(range(7))


def test_a_batch_sampler_is_dealt_out_to_the_replicas_in_turn() -> None:
    split = (2, 2, 2)
    own = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9], [10, 11], [12], [13]]  # two steps, and one left over
    dealt = loader(14, batch_sampler=own)
    assert micro_batches(dealt, split, 3, replica=0) == [[0], [3, 4, 5], [7, 8], [10, 11], [0], [3, 4, 5]]
    assert micro_batches(dealt, split, 3, replica=1) == [[1, 2], [6], [9], [12], [1, 2], [6]]
    assert micro_batches(dealt, split, 2, replica=1, start=1) == [[9], [12], [1, 2], [6]]


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (loader(16, 4, sampler=Rotated(10, said=16)), DataError, "yielded 10, and its len.* is 16"),
        (loader(15, 4), DataError, "15 samples.*one global batch of 16"),
        (loader(3, batch_sampler=[[0], [1], [2]]), DataError, "3 micro-batches"),
        (StreamLoader(lambda: iter(range(99)), 16), ConfigError, "16.*micro-batch size 4"),
        (StreamLoader(Count(15), 4), DataError, "yielded 15 samples in pass 1, and one batch needs 16"),
    ],
)
def test_less_than_a_global_batch_and_another_micro_batch_are_refused(
    given: Any, error: type[ConfigError], said: str
) -> None:
    with pytest.raises(error, match=said):
        micro_batches(given, (2, 2, 4), 1)
