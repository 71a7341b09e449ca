"""A stream is one for all: which samples a step sees is a matter of the step, not of replicas or workers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data as torch_data

from determined_ds.config.batch import Batch
from determined_ds.errors import CheckpointError, ConfigError, DataError
from determined_ds.runtime.data.samples import TrainingData, training_data
from determined_ds.trial.stream_loader import StreamLoader, is_stream
from tests.runtime.data.test_samples import SEED, split


class Count(torch_data.IterableDataset):
    """The numbers below ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Sized(Count):
    def __len__(self) -> int:
        return self.size


class Shuffled(Count):
    """In an order, and with noise, of the generators of random, numpy and torch; another one each pass."""

    def __iter__(self) -> Iterator[float]:
        numbers = list(range(self.size))
        random.shuffle(numbers)
        for number in numbers:
            yield number + float(torch.rand(())) + float(np.random.rand())


class ByWorker(Count):
    """Splits itself by worker, as torch's documentation shows it."""

    def __iter__(self) -> Iterator[int]:
        info = torch_data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(range(first, self.size, step))


class Placed(Count):
    """Knows its place: ``state_dict`` as torchdata's ``StatefulDataLoader`` asks for it. Counts what it yields."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.at = 0
        self.yielded = 0

    def __iter__(self) -> Iterator[float]:
        while self.at < self.size:
            self.at += 1
            self.yielded += 1
            yield self.at - 1 + float(torch.rand(()))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class PlacedIterator(Count):
    """Its iterators know their place, as those of torchdata's nodes do."""

    def __iter__(self) -> Any:
        return _Numbers(self.size)


class _Numbers:
    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def __iter__(self) -> _Numbers:
        return self

    def __next__(self) -> int:
        if self.at == self.size:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class ByEpoch(Shuffled):
    """Its order is a function of the epoch that it is told. Counts what it yields."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.epoch = -1
        self.yielded = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[float]:
        for number in super().__iter__():
            self.yielded += 1
            yield 1000 * self.epoch + number


class Feed:
    """No dataset of torch's: it can be iterated again and again, and that is all."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def read() -> Iterator[int]:
    """A generator function."""
    yield from range(20)


def opened(dataset: Any, batch: Batch, *, replica: int = 0, start: int = 0, **more: Any) -> TrainingData:
    """A replica's training data."""
    options = {name: more.pop(name) for name in ("place", "note") if name in more}
    loader = StreamLoader(dataset, batch.micro_batch_size, **more)
    return training_data(loader, batch=batch, replica=replica, seed=SEED, start_batch=start, **options)


def in_steps(batches: list[list[Any]], batch: Batch) -> list[list[Any]]:
    """The samples of each step, of micro-batches one after the other."""
    steps = range(0, len(batches), batch.accumulation)
    return [list(itertools.chain(*batches[i : i + batch.accumulation])) for i in steps]


def taken(data: TrainingData, batch: Batch, steps: int) -> list[list[Any]]:
    return [each.tolist() for each in itertools.islice(data.batches, steps * batch.accumulation)]


def steps_of(data: TrainingData, batch: Batch, steps: int) -> list[list[Any]]:
    """The samples that a replica is given in each of the next steps."""
    return in_steps(taken(data, batch, steps), batch)


def all_replicas(make: Callable[[], Any], batch: Batch, steps: int, **more: Any) -> list[list[Any]]:
    """The samples of each step in the order of one replica."""
    shares = [
        taken(opened(make(), batch, replica=replica, **more), batch, steps)
        for replica in range(batch.replicas)
    ]
    return in_steps([list(itertools.chain(*row)) for row in zip(*shares, strict=True)], batch)


# ------------------------------------------------------------------------------------ one stream for all


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 7), st.integers(0, 5))
def test_every_split_of_a_batch_trains_the_same_samples_once(
    replicas: int, accumulation: int, micro: int, more: int, start: int
) -> None:
    """Batch ``b`` is samples ``b*G .. (b+1)*G`` of the passes one after the other: what is left over is carried on."""
    batch = split(replicas, accumulation, micro)
    size = batch.global_batch_size + more
    numbers = list(itertools.islice(itertools.cycle(range(size)), (start + 4) * batch.global_batch_size))
    expected = [
        numbers[i : i + batch.global_batch_size] for i in range(0, len(numbers), batch.global_batch_size)
    ]
    assert all_replicas(lambda: Count(size), batch, 4, start=start) == expected[start:]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Shuffled, ByWorker])
def test_workers_change_nothing(kind: Any, workers: int) -> None:
    """A dataset that splits itself by worker is read once, and one that draws its order is read in one order."""
    batch = split(2, 2, 2)
    expected = all_replicas(lambda: kind(20), split(1, 1, 8), 6)
    torch.manual_seed(workers), random.seed(workers), np.random.seed(workers)
    assert all_replicas(lambda: kind(20), batch, 6, num_workers=workers) == expected
    whole = sorted(int(number) for number in itertools.chain(*expected[:5]))
    assert kind is Shuffled or whole == sorted([*range(20), *range(20)])


def test_reading_draws_nothing_from_the_generators_of_training() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand(), torch.rand(())
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    steps_of(opened(Shuffled(20), split(1, 1, 4)), split(1, 1, 4), 7)
    assert (random.random(), np.random.rand(), torch.rand(())) == expected


def test_passes_draw_differently() -> None:
    first, second = steps_of(opened(Shuffled(20), split(1, 1, 20)), split(1, 1, 20), 2)
    assert first != second


@pytest.mark.parametrize("dataset", [Feed(), read, lambda: iter(range(20)), Count(20)])
def test_what_a_stream_may_be(dataset: Any) -> None:
    assert is_stream(dataset)
    assert steps_of(opened(dataset, split(1, 1, 8)), split(1, 1, 8), 3)[2] == [16, 17, 18, 19, 0, 1, 2, 3]


def test_data_with_an_index_is_no_stream() -> None:
    assert not is_stream([1, 2, 3])
    assert not is_stream(torch_data.TensorDataset(torch.zeros(3)))


def test_a_sharded_stream_is_each_replicas_own() -> None:
    batch = split(2, 2, 2)
    shares = [
        steps_of(opened(range_of(replica, 12), batch, replica=replica, sharded=True), batch, 2)
        for replica in range(2)
    ]
    assert shares == [[[0, 2, 4, 6], [8, 10, 0, 2]], [[1, 3, 5, 7], [9, 11, 1, 3]]]


def range_of(replica: int, size: int) -> Callable[[], Iterator[int]]:
    return lambda: iter(range(replica, size, 2))


def test_only_what_is_kept_is_collated() -> None:
    seen: list[int] = []

    def collate(samples: list[int]) -> torch.Tensor:
        seen.extend(samples)
        return torch.tensor(samples)

    batch = split(2, 1, 2)
    steps_of(opened(Count(20), batch, replica=1, collate_fn=collate), batch, 2)
    assert seen == [2, 3, 6, 7]


def test_what_collate_fn_draws_without_workers_is_drawn_from_the_ranks_own_generators() -> None:
    """A checkpoint holds them; and nothing is drawn before training is there."""
    data = opened(Count(20), split(1, 1, 4), collate_fn=lambda samples: torch.rand(1))
    torch.manual_seed(3)
    drawn = [float(next(data.batches)) for _ in range(3)]
    torch.manual_seed(3)
    assert drawn == [float(torch.rand(1)) for _ in range(3)]


# ------------------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize(
    ("kind", "workers", "stop"),
    [
        *itertools.product((Count, Shuffled, Placed, PlacedIterator, ByEpoch), (0,), (1, 4, 5, 9)),
        *itertools.product((Shuffled, Placed), (2,), (5, 9)),
    ],
)
def test_resumed_it_goes_on_as_if_never_stopped(kind: Any, workers: int, stop: int) -> None:
    """In a pass, at its very end (batch 5 of 20 samples), and in a later one; with other workers than before."""
    batch = split(2, 2, 1)
    for replica in range(2):
        whole = steps_of(opened(kind(20), batch, replica=replica, num_workers=workers), batch, 12)
        before = opened(kind(20), batch, replica=replica, num_workers=workers)
        steps_of(before, batch, stop)
        place = before.place.state_dict()
        for other in {workers, 0}:
            more = {"start": stop, "place": place, "num_workers": other}
            after = opened(kind(20), batch, replica=replica, **more)
            assert after.place.state_dict() == place, "nothing is taken yet"
            assert steps_of(after, batch, 12 - stop) == whole[stop:]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Placed, ""),
        (ByEpoch, "data        ByEpoch has no state_dict: reading and skipping 12 samples"),
        (Count, "skipping 32 samples, to resume after batch 8"),
    ],
)
def test_as_little_is_read_again_as_the_dataset_allows(kind: Any, said: str) -> None:
    """Nothing, the last pass, or all: eight batches of four are one pass of 20 samples, and 12 more."""
    batch, notes = split(1, 1, 4), []
    data = opened(kind(20), batch)
    steps_of(data, batch, 8)
    dataset = kind(20)
    after = opened(dataset, batch, start=8, place=data.place.state_dict(), note=notes.append)
    steps_of(after, batch, 1)
    assert getattr(dataset, "yielded", 36) == {Placed: 4, ByEpoch: 12 + 4, Count: 36}[kind]
    assert [said in note for note in notes if "reading and skipping" in note] == [True] * bool(said)


def test_a_checkpoint_that_knows_no_place_reads_all_again() -> None:
    without = opened(Count(20), split(1, 1, 4), start=8)
    assert steps_of(without, split(1, 1, 4), 2) == [[12, 13, 14, 15], [16, 17, 18, 19]]


class Locked(Placed):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


def test_a_state_that_a_worker_cannot_send_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the state_dict of Locked cannot be saved: cannot pickle"):
        opened(Locked(20), split(1, 1, 4), num_workers=1)


def test_a_state_that_nothing_takes_is_refused() -> None:
    batch = split(1, 1, 4)
    data = opened(Placed(20), batch)
    steps_of(data, batch, 1)
    with pytest.raises(CheckpointError, match="Count has no load_state_dict to take it"):
        opened(Count(20), batch, start=1, place=data.place.state_dict())


# ------------------------------------------------------------------------------------------------- its end


def test_an_epoch_is_counted_by_the_length() -> None:
    batch = split(2, 1, 4)
    assert opened(Sized(31), batch).batches_per_epoch == 3
    assert opened(Count(31), batch).batches_per_epoch is None


def test_it_is_said_once_that_a_stream_begins_again() -> None:
    batch, said = split(1, 1, 4), []
    data = opened(Count(9), batch, note=said.append)
    steps_of(data, batch, 2)
    assert said == []
    steps_of(data, batch, 10)
    assert said == ["data        Count ended after 9 samples, and begins again"]


def test_a_length_that_is_not_true_is_reported() -> None:
    class Boasting(Count):
        def __len__(self) -> int:
            return 2 * self.size

    batch, said = split(1, 1, 4), []
    steps_of(opened(Boasting(9), batch, note=said.append), batch, 5)
    assert len(said) == 1
    assert "yielded 9 samples in pass 1" in said[0]
    assert "its len() is 18" in said[0]
    said.clear()
    steps_of(opened(Sized(9), batch, note=said.append), batch, 5)
    assert said == [], "nothing to say of one that is as long as it says"


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Count(0), "yields no samples"),
        (Count(7), "7 samples, fewer than the 8"),
        (Sized(7), "7 samples, less than one global batch of 8"),
    ],
)
def test_less_than_one_global_batch_is_refused(dataset: Any, message: str, workers: int) -> None:
    with pytest.raises(DataError, match=message):
        steps_of(opened(dataset, split(2, 2, 2), replica=1, num_workers=workers), split(2, 2, 2), 1)


def test_a_dataset_that_can_be_iterated_once_only_is_refused() -> None:
    class Once(Count):
        def __init__(self) -> None:
            self.numbers = iter(range(20))

        def __iter__(self) -> Iterator[int]:
            return self.numbers

    batch = split(1, 1, 4)
    data = opened(Once(), batch)
    assert len(steps_of(data, batch, 5)) == 5
    with pytest.raises(DataError, match=r"yielded nothing when it was iterated again \(pass 2\)") as raised:
        next(data.batches)
    assert "a function that returns a new iterator" in raised.value.problems[0].fix


@pytest.mark.parametrize(
    ("dataset", "options", "fix"),
    [
        (read(), {}, "give the function"),
        (Count(9), {"shuffle": True}, "shuffle in the dataset"),
        (Count(9), {"drop_last": True}, "leave drop_last out"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_with_the_fix(
    dataset: Any, options: dict[str, Any], fix: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        StreamLoader(dataset, 4, **options)
    assert fix in raised.value.problems[0].fix
