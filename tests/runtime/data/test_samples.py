"""Which samples an optimizer step sees: a matter of the seed and the step, and of nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from determined.pytorch import DataLoader
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data as torch_data

from determined_ds.config.batch import Batch
from determined_ds.errors import ConfigError, DataError
from determined_ds.runtime.checkpoints.redistributed import is_equal
from determined_ds.runtime.data.samples import training_data
from determined_ds.runtime.data.shares import CallPlan, IndexedShare, ValidationBatches
from determined_ds.trial.stream_loader import StreamLoader

SEED = 7


class Numbers(torch_data.Dataset[int]):
    """Sample ``i`` is the number ``i``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def split(replicas: int, accumulation: int, micro: int) -> Batch:
    return Batch(
        global_batch_size=replicas * accumulation * micro,
        micro_batch_size=micro,
        accumulation=accumulation,
        replicas=replicas,
    )


def loader_of(size: int, batch: Batch, **options: Any) -> DataLoader:
    options = {"shuffle": True, **options}
    return DataLoader(Numbers(size), batch_size=batch.micro_batch_size, **options)


def micro_batches(
    loader: Any, batch: Batch, steps: int, *, replica: int = 0, seed: int = SEED, start_batch: int = 0
) -> list[list[int]]:
    """What a replica is given in so many optimizer steps."""
    stream = training_data(loader, batch=batch, replica=replica, seed=seed, start_batch=start_batch)
    return [each.tolist() for each in itertools.islice(stream.batches, steps * batch.accumulation)]


def samples_of_steps(size: int, batch: Batch, steps: int, **options: Any) -> list[list[int]]:
    """The samples of each optimizer step, of all replicas together, sorted."""
    found: list[list[int]] = [[] for _ in range(steps)]
    for replica in range(batch.replicas):
        given_to = micro_batches(loader_of(size, batch, **options), batch, steps, replica=replica)
        for index, samples in enumerate(given_to):
            found[index // batch.accumulation] += samples
    return [sorted(samples) for samples in found]


# ------------------------------------------------------------------------------------ the global stream


@st.composite
def splits(draw: st.DrawFn) -> tuple[Batch, int]:
    """A split of a global batch, and a size of data of one to four batches and something more."""
    batch = split(draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    epochs = draw(st.integers(1, 4))
    return batch, epochs * batch.global_batch_size + draw(st.integers(0, batch.global_batch_size - 1))


@given(splits(), st.booleans())
def test_every_split_of_a_batch_trains_the_same_samples(
    batch_and_size: tuple[Batch, int], shuffle: bool
) -> None:
    batch, size = batch_and_size
    whole = split(1, 1, batch.global_batch_size)
    steps = 2 * (size // batch.global_batch_size)
    expected = samples_of_steps(size, whole, steps, shuffle=shuffle)
    assert samples_of_steps(size, batch, steps, shuffle=shuffle) == expected


@given(splits(), st.booleans())
def test_an_epoch_has_no_sample_twice(batch_and_size: tuple[Batch, int], shuffle: bool) -> None:
    batch, size = batch_and_size
    per_epoch = size // batch.global_batch_size
    steps = samples_of_steps(size, batch, 2 * per_epoch, shuffle=shuffle)
    for epoch in (steps[:per_epoch], steps[per_epoch:]):
        seen = [sample for step in epoch for sample in step]
        assert len(set(seen)) == len(seen) == per_epoch * batch.global_batch_size


@given(splits(), st.integers(0, 9), st.booleans())
def test_to_start_at_a_batch_is_to_skip_those_before(
    batch_and_size: tuple[Batch, int], start: int, shuffle: bool
) -> None:
    batch, size = batch_and_size
    loader = loader_of(size, batch, shuffle=shuffle)
    for replica in range(batch.replicas):
        everything = micro_batches(loader, batch, start + 5, replica=replica)
        late = micro_batches(loader, batch, 5, replica=replica, start_batch=start)
        assert late == everything[start * batch.accumulation :]


GLOBAL = 12
# Each as (replicas, samples in a micro-batch).
CUTS = st.sampled_from(
    [
        (replicas, micro)
        for replicas in (1, 2, 3, 4)
        for micro in (1, 2, 3)
        if GLOBAL % (replicas * micro) == 0
    ]
)


def cut(replicas: int, micro: int) -> Batch:
    return split(replicas, GLOBAL // (replicas * micro), micro)


class Counting(torch_data.IterableDataset[int]):
    """A stream of 30 numbers a pass; ``keeps`` its position, or is read from its beginning."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 30:
            self.at += 1
            yield self.at - 1
        self.at = 0


class Keeping(Counting):
    """One that restores its position."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def loader_over(kind: str, batch: Batch) -> Any:
    if kind in ("stream", "keeping"):
        return StreamLoader(Keeping() if kind == "keeping" else Counting(), batch_size=batch.micro_batch_size)
    sampler = torch_data.WeightedRandomSampler(torch.ones(40), 40) if kind == "drawn" else None
    return loader_of(40, batch, shuffle=kind == "shuffled", **({"sampler": sampler} if sampler else {}))


@pytest.mark.parametrize("kind", ["shuffled", "in order", "drawn", "stream", "keeping"])
@given(legs=st.lists(st.tuples(CUTS, st.integers(1, 4)), min_size=1, max_size=5))
def test_any_sequence_of_ranks_and_micro_batches_trains_the_same_samples(
    kind: str, legs: list[tuple[tuple[int, int], int]]
) -> None:
    """Stopped and resumed between the legs: each is some replicas, a micro-batch, and optimizer steps."""
    found: list[list[int]] = []
    place: dict[str, Any] = {}
    for (replicas, micro), steps in legs:
        batch, start, after = cut(replicas, micro), len(found), []
        found += [[] for _ in range(steps)]
        for replica in range(replicas):
            data = training_data(
                loader_over(kind, batch),
                batch=batch,
                replica=replica,
                seed=SEED,
                start_batch=start,
                place=place,
                note=lambda _: None,
            )
            for index in range(steps * batch.accumulation):
                found[start + index // batch.accumulation] += next(data.batches).tolist()
            after.append(data.place.state_dict() if data.place is not None else {})
        assert all(is_equal(position, after[0]) for position in after[1:])  # any replica's is that of all
        place = after[-1]
    whole = training_data(
        loader_over(kind, cut(1, 3)),
        batch=cut(1, 3),
        replica=0,
        seed=SEED,
        start_batch=0,
        note=lambda _: None,
    )
    expected = [[int(each) for _ in range(GLOBAL // 3) for each in next(whole.batches)] for _ in found]
    assert [sorted(samples) for samples in found] == [sorted(samples) for samples in expected]


def test_the_order_within_a_batch_is_the_same_every_time() -> None:
    batch = split(2, 2, 3)
    first = micro_batches(loader_of(40, batch), batch, 7, replica=1)
    torch.rand(100)  # whatever else was drawn meanwhile
    assert micro_batches(loader_of(40, batch), batch, 7, replica=1) == first


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    batch = split(1, 1, 20)
    first, second = micro_batches(loader_of(20, batch), batch, 2)
    other_seed = micro_batches(loader_of(20, batch), batch, 1, seed=SEED + 1)[0]
    assert sorted(first) == sorted(second) == sorted(other_seed) == list(range(20))
    assert len({tuple(first), tuple(second), tuple(other_seed), tuple(range(20))}) == 4


def test_batches_per_epoch_are_the_whole_ones() -> None:
    batch = split(2, 2, 2)
    loader = loader_of(31, batch)
    assert training_data(loader, batch=batch, replica=0, seed=SEED, start_batch=0).batches_per_epoch == 3


def test_what_shuffling_leaves_over_is_another_rest_each_epoch() -> None:
    batch = split(1, 1, 4)
    steps = micro_batches(loader_of(7, batch), batch, 30)
    assert {sample for step in steps for sample in step} == set(range(7))


def test_workers_give_the_same_stream() -> None:
    batch = split(2, 2, 2)
    alone = micro_batches(loader_of(30, batch), batch, 5, replica=1, start_batch=2)
    helped = micro_batches(loader_of(30, batch, num_workers=2), batch, 5, replica=1, start_batch=2)
    assert helped == alone


# --------------------------------------------------------------------------- samplers of the author's own


def test_a_sampler_decides_the_order() -> None:
    batch = split(2, 1, 2)
    loader = loader_of(8, batch, shuffle=False, sampler=list(range(7, -1, -1)))
    assert micro_batches(loader, batch, 3, replica=0) == [[7, 6], [3, 2], [7, 6]]
    assert micro_batches(loader, batch, 3, replica=1) == [[5, 4], [1, 0], [5, 4]]


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


def test_a_sampler_is_told_the_epoch_on_resume_too() -> None:
    batch = split(1, 1, 3)
    loader = loader_of(3, batch, shuffle=False, sampler=Rotated(3))
    assert micro_batches(loader, batch, 3) == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert micro_batches(loader, batch, 1, start_batch=2) == [[2, 0, 1]]


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("kind", ["weighted", "with replacement", "subset"])
def test_a_random_sampler_draws_the_same_on_every_rank_and_on_resume(kind: str, own_generator: bool) -> None:
    """Each rank has its own state of torch's generator; what it draws must not depend on that."""
    batch = split(2, 1, 3)

    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(99) if own_generator else None
        sampler: Any = {
            "weighted": torch_data.WeightedRandomSampler(torch.ones(12).tolist(), 12, generator=generator),
            "with replacement": torch_data.RandomSampler(
                Numbers(12), replacement=True, num_samples=12, generator=generator
            ),
            "subset": torch_data.SubsetRandomSampler(list(range(12)), generator=generator),
        }[kind]
        return loader_of(12, batch, shuffle=False, sampler=sampler)

    torch.manual_seed(1)
    everything = micro_batches(loader(), batch, 6)
    torch.manual_seed(2)
    assert micro_batches(loader(), batch, 6) == everything
    assert micro_batches(loader(), batch, 3, start_batch=3) == everything[3:]
    assert everything[:2] != everything[2:4], "epochs differ"


def test_drawing_an_order_leaves_the_generators_of_training_alone() -> None:
    batch = split(1, 1, 4)
    sampler = torch_data.WeightedRandomSampler([1.0] * 4, 4)
    before = torch.random.get_rng_state()
    stream = iter(training_data_sampler(loader_of(4, batch, shuffle=False, sampler=sampler), batch))
    next(stream), next(stream)
    assert torch.equal(torch.random.get_rng_state(), before)


def training_data_sampler(loader: DataLoader, batch: Batch) -> Any:
    """The sampler alone: torch's loader around it draws a seed for its workers."""
    stream = training_data(loader, batch=batch, replica=0, seed=SEED, start_batch=0)
    return stream.batches._index_sampler  # type: ignore[attr-defined]


def test_a_batch_sampler_is_dealt_out_to_the_replicas_in_turn() -> None:
    batch = split(2, 2, 2)
    own = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9], [10, 11], [12], [13]]  # two steps, and one left over
    loader = DataLoader(Numbers(14), batch_sampler=own)  # type: ignore[arg-type]
    assert micro_batches(loader, batch, 3, replica=0) == [[0], [3, 4, 5], [7, 8], [10, 11], [0], [3, 4, 5]]
    assert micro_batches(loader, batch, 3, replica=1) == [[1, 2], [6], [9], [12], [1, 2], [6]]
    assert micro_batches(loader, batch, 2, replica=1, start_batch=1) == [[9], [12], [1, 2], [6]]


def test_a_random_batch_sampler_deals_no_batch_twice() -> None:
    batch = split(2, 2, 1)
    sampler = torch_data.BatchSampler(torch_data.RandomSampler(Numbers(16)), 2, drop_last=True)

    class Own(torch_data.BatchSampler):
        """A kind of its own, so that it is taken as it is."""

    own = Own(sampler.sampler, 2, drop_last=True)
    seen: list[int] = []
    for replica in range(2):
        torch.manual_seed(replica)
        loader = DataLoader(Numbers(16), batch_sampler=own)
        seen += itertools.chain(*micro_batches(loader, batch, 2, replica=replica))
    assert sorted(seen) == list(range(16))


def test_a_loader_that_is_not_determineds_is_repeated_as_it_is() -> None:
    batch = split(2, 2, 2)
    loader = torch_data.DataLoader(Numbers(10), batch_size=2)
    assert micro_batches(loader, batch, 4) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1], [2, 3], [4, 5]]
    assert micro_batches(loader, batch, 1, start_batch=2) == [[8, 9], [0, 1]]


# ------------------------------------------------------------------------------------------ what is refused


def test_less_than_one_global_batch_is_refused() -> None:
    batch = split(2, 2, 4)
    with pytest.raises(DataError, match=r"15 samples.*one global batch of 16") as raised:
        training_data(loader_of(15, batch), batch=batch, replica=0, seed=SEED, start_batch=0)
    assert "at most 15" in raised.value.problems[0].fix


def test_too_few_batches_of_a_batch_sampler_are_refused() -> None:
    batch = split(2, 2, 4)
    loader = DataLoader(Numbers(3), batch_sampler=[[0], [1], [2]])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="3 micro-batches"):
        training_data(loader, batch=batch, replica=0, seed=SEED, start_batch=0)


@pytest.mark.parametrize(
    "loader", [DataLoader(Numbers(100), batch_size=16), StreamLoader(lambda: iter(range(100)), 16)]
)
def test_another_batch_size_than_the_micro_batch_is_refused(loader: Any) -> None:
    batch = split(2, 2, 4)
    with pytest.raises(ConfigError, match=r"16.*micro-batch size 4") as raised:
        training_data(loader, batch=batch, replica=0, seed=SEED, start_batch=0)
    assert "training_loader" in raised.value.problems[0].fix


def test_a_trial_that_accumulates_by_itself_may_have_another_batch_size() -> None:
    batch = split(2, 4, 2)
    loader = DataLoader(Numbers(32), batch_size=4, shuffle=False)
    stream = training_data(loader, batch=batch, replica=1, seed=SEED, start_batch=1, manual=True)
    taken = [next(stream.batches).tolist() for _ in range(2)]  # half as many, twice as large
    assert taken == [[20, 21, 22, 23], [28, 29, 30, 31]]


# ------------------------------------------------------------------------------------------- validation


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4))
def test_every_validation_sample_counts_on_one_replica_and_all_go_through_as_many_batches(
    size: int, micro: int, replicas: int
) -> None:
    seen: list[int] = []
    shares = [
        IndexedShare(DataLoader(Numbers(size), batch_size=micro), replica=replica, replicas=replicas)
        for replica in range(replicas)
    ]
    plan = CallPlan([share.sizes for share in shares], at_most=None)
    longest = plan.num_batches
    for share in shares:
        batches = ValidationBatches(share.open(), iter([plan]), len)
        taken = list(batches)
        assert len(taken) == len(batches.weights) == longest, "a forward pass may be collective"
        for batch, weight in zip(taken, batches.weights, strict=True):
            assert weight in (0, len(batch))
            seen += batch.tolist() if weight else []
    assert sorted(seen) == list(range(size))


def test_validation_without_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match="no batch") as raised:
        IndexedShare(DataLoader(Numbers(3), batch_size=4, drop_last=True), replica=0, replicas=1)
    assert "drop_last" in raised.value.problems[0].fix
