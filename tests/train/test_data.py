"""What a step trains on, by torch's loaders, Determined's, and streams: not a matter of ranks, workers or a resume."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from determined.pytorch import DataLoader, samplers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data as torch_data

from determined_ds import StreamLoader
from determined_ds.errors import ConfigError
from tests.harness.ranks import Ranks
from tests.package import training_data
from tests.train.small import fit, hyperparameters

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


class Rotated(torch_data.Sampler[int]):
    """Starts one further every epoch, as ``set_epoch`` of torch's distributed samplers means it."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

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


def test_a_batch_sampler_is_dealt_out_to_the_replicas_in_turn() -> None:
    split = (2, 2, 2)
    own = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9], [10, 11], [12], [13]]  # two steps, and one left over
    dealt = loader(14, batch_sampler=own)
    assert micro_batches(dealt, split, 3, replica=0) == [[0], [3, 4, 5], [7, 8], [10, 11], [0], [3, 4, 5]]
    assert micro_batches(dealt, split, 3, replica=1) == [[1, 2], [6], [9], [12], [1, 2], [6]]
    assert micro_batches(dealt, split, 2, replica=1, start=1) == [[9], [12], [1, 2], [6]]


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


SPLIT = (2, 2, 2)
NUMBERS: Any = range(35)


IN_PAIRS = torch_data.BatchSampler(torch_data.SequentialSampler(NUMBERS), 2, True)
SKIPPING = torch_data.DataLoader(NUMBERS, batch_sampler=samplers.SkipBatchSampler(IN_PAIRS, 3))
SPLIT_SAMPLER = torch_data.DistributedSampler(NUMBERS, num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (
            torch_data.DataLoader(Sized(99), batch_size=2),
            "every replica would read the same.*training_loader",
        ),
        (SKIPPING, "SkipBatchSampler.*skips samples itself"),
        (torch_data.DataLoader(NUMBERS, 2, sampler=SPLIT_SAMPLER), "DistributedSampler.*shuffle=True"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(loader: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)Trial.build_training_data_loader.*{said}"):
        training_data(loader, SPLIT)


def test_what_an_author_vouches_for_is_used_as_it_is() -> None:
    """By every replica, and after a resume skipped as far as it was read."""
    loader, expected = torch_data.DataLoader(NUMBERS, batch_size=2), [[0, 1, 2, 3], [4, 5, 6, 7]]
    for replica in range(2):
        torch.manual_seed(replica)  # replicas stand at places of their own
        assert taken(training_data(loader, SPLIT, replica=replica, as_it_is=True), SPLIT, 2) == expected
    assert taken(training_data(loader, SPLIT, start=1, as_it_is=True), SPLIT, 1) == expected[1:]


def train(run_dir: Path, kind: str, length: tuple[str, int]) -> Any:
    """In a rank: train, and return the samples of each micro-batch, or what is refused."""
    from determined_ds import DataParallelTrial

    seen: list[list[int]] = []

    class Seeing(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 2)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            if model.module.training:
                seen.append(batch.tolist())
            return model(batch.float().reshape(-1, 1)).mean()

        def build_training_data_loader(self) -> Any:
            size, rank = self.micro_batch_size, self.context.distributed.rank
            data: Any = range(20)
            return {
                "torch": lambda: torch_data.DataLoader(data, batch_size=size, shuffle=True),
                "stream": lambda: self.training_loader(Count(20)),
                "sized": lambda: self.training_loader(Sized(20), num_workers=1),
                "split": lambda: self.training_loader(range(rank, 20, 2).__iter__),
                "whole": lambda: self.training_loader(range(20).__iter__, sharded=True),
            }[kind]()

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(Count(5))

    hparams = hyperparameters(1, gradient_accumulation_steps=2)
    try:
        fit(run_dir, Seeing, hparams=hparams, max_length=length, checkpoint_policy="none")
    except ConfigError as error:
        return str(error)
    return seen


@pytest.mark.parametrize(
    ("kind", "length"), [("torch", ("batches", 4)), ("stream", ("batches", 5)), ("sized", ("epochs", 2))]
)
def test_two_replicas_train_each_sample_once(
    two_ranks: Ranks, kind: str, length: tuple[str, int], tmp_path: Path
) -> None:
    """Their micro-batches in turns are the order of one replica: a shuffle, or 0, 1, 2 ... An epoch is two batches."""
    first, second = two_ranks.run(train, tmp_path, kind, length)
    in_turns = list(itertools.chain(*itertools.chain(*zip(first, second, strict=True))))
    if kind == "torch":  # two whole batches of 8 to an epoch
        assert len(set(in_turns[:16])) == len(set(in_turns[16:])) == 16
        assert in_turns[:16] != in_turns[16:]
    else:
        assert in_turns == [*range(20), *range(20)][: 8 * (5 if kind == "stream" else 4)]


def test_what_no_rank_can_know_or_read_is_refused_or_warned_of(two_ranks: Ranks, tmp_path: Path) -> None:
    """Epochs of a stream without a length; one that splits itself; one that is said to, and does not."""
    for said in two_ranks.run(train, tmp_path / "stream", "stream", ("epochs", 2)):
        assert "fit.max_length = '2 epochs': the training data has no length, and so no epochs" in said
    for said in two_ranks.run(train, tmp_path / "split", "split", ("batches", 2)):
        assert "other samples on one replica than on another" in said
    first, second = two_ranks.run(train, tmp_path / "whole", "whole", ("batches", 2))
    assert first == second
    assert "first samples are the same on every replica" in two_ranks.said(0)
