"""Loaders that are not Determined's: taken over, refused with the fix, or taken as they are where allowed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from determined.pytorch import DataLoader, samplers
from torch.utils import data as torch_data

from determined_ds.config.batch import Batch
from determined_ds.errors import ConfigError, DataError
from determined_ds.runtime.data.loaders import build_loader, check_apart
from determined_ds.runtime.data.samples import training_data
from determined_ds.runtime.data.shares import IndexedShare
from determined_ds.trial.stream_loader import StreamLoader
from tests.ranks import Ranks
from tests.runtime.data.test_streams import Count, Placed, Sized

TRAINING, VALIDATION = "build_training_data_loader", "build_validation_data_loader"
BATCH = Batch(global_batch_size=8, micro_batch_size=2, accumulation=2, replicas=2)
NUMBERS = torch_data.TensorDataset(torch.arange(35))


class Trial:
    """Returns one thing as its loaders."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def build_training_data_loader(self) -> Any:
        return self.returned

    build_validation_data_loader = build_training_data_loader

    def training_loader(self, dataset: Any) -> Any:
        """What trials of ours have."""


def taken(
    loader: Any, method: str = TRAINING, *, opted_in: bool = False, said: list[str] | None = None
) -> Any:
    context = SimpleNamespace(_data_repro_checks_disabled=opted_in)
    return build_loader(Trial(loader), context, method, [].append if said is None else said.append)


def steps(loader: Any, num: int, *, start: int = 0, opted_in: bool = False) -> list[list[list[int]]]:
    """What each of two replicas trains in each step."""
    given = []
    for replica in range(BATCH.replicas):
        torch.manual_seed(replica)  # replicas stand at places of their own
        data = training_data(
            taken(loader, opted_in=opted_in), batch=BATCH, replica=replica, seed=7, start_batch=start
        )
        batches = [each[0].tolist() for each in itertools.islice(data.batches, num * BATCH.accumulation)]
        given.append([list(itertools.chain(*pair)) for pair in zip(batches[::2], batches[1::2], strict=True)])
    return given


# --------------------------------------------------------------------------------------------- taken over

SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: torch_data.SequentialSampler(NUMBERS),
    "random": lambda: torch_data.RandomSampler(NUMBERS),
    "random with a generator": lambda: torch_data.RandomSampler(NUMBERS, generator=torch.Generator()),
    "random, some of them": lambda: torch_data.RandomSampler(NUMBERS, num_samples=20),
    "with replacement": lambda: torch_data.RandomSampler(NUMBERS, replacement=True, num_samples=50),
    "subset": lambda: torch_data.SubsetRandomSampler(range(5, 30)),
    "weighted": lambda: torch_data.WeightedRandomSampler([1.0] * 35, 40),
    "distributed": lambda: torch_data.DistributedSampler(NUMBERS, num_replicas=2, rank=0),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_torchs_loader_with_torchs_samplers_trains_the_global_stream(name: str) -> None:
    """As the same loader of Determined: split without overlap, and resumed where it stopped."""
    loader = torch_data.DataLoader(NUMBERS, batch_size=2, sampler=SAMPLERS[name]())
    first, second = whole = steps(loader, 9)
    assert [each[4:] for each in whole] == steps(loader, 5, start=4)
    if name == "distributed":  # it has split already: its dataset is taken, in the order that it would give
        assert whole == steps(DataLoader(NUMBERS, batch_size=2, shuffle=True), 9)
    else:
        assert whole == steps(DataLoader(NUMBERS, batch_size=2, sampler=SAMPLERS[name]()), 9)
    epoch = training_data(taken(loader), batch=BATCH, replica=0, seed=7, start_batch=0).batches_per_epoch
    seen = [number for step in (*first[:epoch], *second[:epoch]) for number in step]
    assert len(seen) == epoch * BATCH.global_batch_size
    assert len(set(seen)) == len(seen) or name in ("with replacement", "weighted")


@pytest.mark.parametrize("kind", [torch_data.DataLoader, DataLoader])
def test_a_batch_sampler_around_them_too(kind: Any) -> None:
    sampler = torch_data.BatchSampler(torch_data.RandomSampler(NUMBERS), 2, drop_last=True)
    expected = steps(torch_data.DataLoader(NUMBERS, batch_size=2, shuffle=True), 6)
    assert steps(kind(NUMBERS, batch_sampler=sampler), 6) == expected


def collate(samples: list[Any]) -> list[torch.Tensor]:
    return [100 + torch.stack([number for (number,) in samples])]


def test_its_other_options_are_kept() -> None:
    class Own(torch_data.DataLoader):
        """A subclass that iterates as torch's does."""

    loader = Own(NUMBERS, batch_size=2, num_workers=1, collate_fn=collate, prefetch_factor=3, timeout=60)
    found = taken(loader)
    assert (found.num_workers, found.prefetch_factor, found.timeout) == (1, 3, 60)
    assert steps(loader, 2)[1] == [[102, 103, 106, 107], [110, 111, 114, 115]]


@pytest.mark.parametrize("distributed", [False, True])
def test_a_validation_is_split_to_the_last_sample(distributed: bool) -> None:
    """In an order that all replicas share, although each stands at another place in its generators."""
    seen = []
    for replica in range(2):
        torch.manual_seed(replica)
        sampler = torch_data.DistributedSampler(NUMBERS, 2, replica) if distributed else None
        loader = torch_data.DataLoader(NUMBERS, batch_size=4, shuffle=not distributed, sampler=sampler)
        share = IndexedShare(taken(loader, VALIDATION), replica=replica, replicas=2)
        seen += [number for (batch,) in share for number in batch.tolist()]
    assert sorted(seen) == list(range(35))


class Short(torch_data.SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_a_sampler_that_yields_less_than_its_length_is_refused() -> None:
    with pytest.raises(DataError, match=r"yielded 20, and its len\(\) is 35"):
        steps(torch_data.DataLoader(NUMBERS, batch_size=2, sampler=Short(NUMBERS)), 1)


# ------------------------------------------------------------------------------------------------ refused


class OwnIteration(torch_data.DataLoader):
    def __iter__(self) -> Any:
        return iter([])


class RankSampler(torch_data.SequentialSampler):
    num_replicas = 2


REFUSED: dict[str, tuple[Any, str, str]] = {
    # name: (what is returned, what is said of it, the fix)
    "iterable": (
        torch_data.DataLoader(Sized(99), batch_size=2),
        "torch's DataLoader over Sized.*every replica would read the same samples",
        "return self.training_loader(dataset)",
    ),
    "own iteration": (
        OwnIteration(NUMBERS),
        "OwnIteration over TensorDataset",
        "self.training_loader(dataset)",
    ),
    "its own batches": (
        torch_data.DataLoader(NUMBERS, batch_size=None),
        "batch_size=None",
        "self.training_loader",
    ),
    "list of batches": ([[1, 2], [3, 4]], "returned list", "self.training_loader(dataset)"),
    "nothing": (None, "returned None; expected a data loader", "self.training_loader(dataset)"),
    "dataset": (NUMBERS, "returned a TensorDataset; expected a data loader", "self.training_loader(dataset)"),
    "function": (print, "which is not a data loader", "self.training_loader(dataset)"),
    "sampler of a rank": (
        torch_data.DataLoader(NUMBERS, batch_size=2, sampler=RankSampler(NUMBERS)),
        "RankSampler.*split over the replicas twice",
        "a sampler over all samples",
    ),
    "Determined's sampler of a rank": (
        DataLoader(
            NUMBERS, 2, sampler=samplers.DistributedSampler(torch_data.SequentialSampler(NUMBERS), 2, 0)
        ),
        "DistributedSampler.*split over the replicas twice",
        "a sampler over all samples",
    ),
    "Determined's skip": (
        torch_data.DataLoader(
            NUMBERS,
            batch_sampler=samplers.SkipBatchSampler(
                torch_data.BatchSampler(torch_data.SequentialSampler(NUMBERS), 2, True), 3
            ),
        ),
        "SkipBatchSampler.*skips samples itself",
        "a sampler over all samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_over_is_refused_with_the_fix(name: str) -> None:
    loader, message, fix = REFUSED[name]
    with pytest.raises(ConfigError, match=f"(?s)Trial.{TRAINING}.*{message}") as raised:
        taken(loader)
    assert fix in raised.value.problems[0].fix


def test_the_fix_is_one_that_the_trial_has() -> None:
    """A trial by hand has no ``training_loader``, and validation has a loader of its own."""
    loader = torch_data.DataLoader(Count(9))
    with pytest.raises(ConfigError, match=r"self\.validation_loader\(dataset\)"):
        taken(loader, VALIDATION)
    by_hand = SimpleNamespace(build_training_data_loader=lambda: loader)
    with pytest.raises(
        ConfigError, match=r"determined_ds\.StreamLoader\(dataset, batch_size=context\.get_train"
    ):
        build_loader(by_hand, SimpleNamespace(_data_repro_checks_disabled=False), TRAINING, print)


def test_one_dataset_with_a_place_is_not_read_for_training_and_for_validation() -> None:
    dataset = Placed(20)
    check_apart(StreamLoader(dataset, 2), Placed(20))
    check_apart(StreamLoader(shared := Count(20), 2), shared)  # each iteration of it is its own
    with pytest.raises(ConfigError, match="a validation would move it"):
        check_apart(StreamLoader(dataset, 2), dataset)


# -------------------------------------------------------------------------------------- taken as they are


def test_with_the_opt_in_it_is_used_as_it_is_and_said_so() -> None:
    said: list[str] = []
    loader = torch_data.DataLoader(NUMBERS, batch_size=2)
    assert taken(loader, opted_in=True, said=said) is loader
    assert len(said) == 1
    assert f"Trial.{TRAINING}: torch's DataLoader over TensorDataset is used as it is" in said[0]
    first, second = steps(loader, 3, opted_in=True)
    assert first == second == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert steps(loader, 1, start=2, opted_in=True)[0] == first[2:]


def test_the_opt_in_leaves_the_loaders_of_ours_alone() -> None:
    said: list[str] = []
    for loader in (DataLoader(NUMBERS, batch_size=2), StreamLoader(Count(9), 2)):
        assert taken(loader, opted_in=True, said=said) is loader
    assert said == []


class PlacedLoader:
    """A loader with a state, as torchdata's ``StatefulDataLoader``; its length is not known."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < 7:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


@pytest.mark.parametrize("stop", [3, 7, 9])
def test_one_with_a_state_is_resumed_by_it(stop: int) -> None:
    batch = Batch(global_batch_size=1, micro_batch_size=1, accumulation=1, replicas=1)

    def opened(start: int = 0, place: Any = None) -> Any:
        return training_data(PlacedLoader(), batch=batch, replica=0, seed=7, start_batch=start, place=place)

    whole = list(map(int, itertools.islice(opened().batches, 20)))
    before = opened()
    assert before.batches_per_epoch is None
    assert len(list(itertools.islice(before.batches, stop))) == stop
    after = opened(stop, before.place.state_dict())
    assert list(map(int, itertools.islice(after.batches, 20 - stop))) == whole[stop:]


def test_one_without_a_batch_is_refused() -> None:
    with pytest.raises(DataError, match="yields no batch"):
        steps(SimpleLoader(), 1, opted_in=True)


class SimpleLoader:
    def __iter__(self) -> Iterator[Any]:
        return iter([])


# ---------------------------------------------------------------------------------------- in a real run


def hyperparameters() -> dict[str, Any]:
    ds_config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    return {"global_batch_size": 8, "deepspeed_config": {"gradient_accumulation_steps": 2, **ds_config}}


def train(run_dir: Path, kind: str, length: tuple[str, int], opt_in: bool = False) -> Any:
    """In a rank: train, and return the samples of each micro-batch, or what is refused."""
    from determined.pytorch import Batch as Batches
    from determined.pytorch import Epoch

    from determined_ds import DataParallelTrial, Trainer, open_context

    seen: list[list[int]] = []

    class Seeing(DataParallelTrial):
        def prepare(self) -> None:
            if opt_in:
                self.context.disable_dataset_reproducibility_checks()

        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(1, 2)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            if model.module.training:
                seen.append(batch.tolist())
            return model(batch.float().reshape(-1, 1)).mean()

        def build_training_data_loader(self) -> Any:
            size = self.micro_batch_size
            return {
                "torch": lambda: torch_data.DataLoader(range(20), batch_size=size, shuffle=True),  # type: ignore[arg-type]
                "iterable": lambda: torch_data.DataLoader(Sized(20), batch_size=size),
                "stream": lambda: self.training_loader(Count(20)),
                "sized": lambda: self.training_loader(Sized(20), num_workers=1),
                "split": lambda: self.training_loader(range(self.context.distributed.rank, 20, 2).__iter__),
            }[kind]()

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(Count(5))

    with open_context(
        hparams=hyperparameters(), run_dir=run_dir, accelerator="cpu", enable_tensorboard_logging=False
    ) as context:
        unit = {"batches": Batches, "epochs": Epoch}[length[0]]
        try:
            Trainer(Seeing(context), context).fit(max_length=unit(length[1]), checkpoint_policy="none")
        except ConfigError as error:
            return str(error)
    return seen


@pytest.mark.parametrize("kind", ["torch", "stream", "sized"])
def test_two_replicas_train_each_sample_once(two_ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """Their micro-batches in turns are the order of one replica: here 0, 1, 2 ..., or a shuffle."""
    first, second = two_ranks.run(train, tmp_path, kind, ("batches", 5))
    in_turns = list(itertools.chain(*itertools.chain(*zip(first, second, strict=True))))
    if kind == "torch":  # two whole batches of 8 to an epoch
        assert len(set(in_turns[:16])) == len(set(in_turns[16:32])) == 16
        assert in_turns[:16] != in_turns[16:32]
    else:
        assert in_turns == [*range(20), *range(20)]


def test_an_epoch_of_a_stream_with_a_length(two_ranks: Ranks, tmp_path: Path) -> None:
    first, _ = two_ranks.run(train, tmp_path, "sized", ("epochs", 2))
    assert len(first) == 2 * (20 // 8) * 2


def test_a_stream_without_a_length_has_no_epochs(two_ranks: Ranks, tmp_path: Path) -> None:
    for said in two_ranks.run(train, tmp_path, "stream", ("epochs", 2)):
        assert "fit.max_length = '2 epochs': the training data has no length, and so no epochs" in said
        assert "count in batches" in said


def test_the_same_samples_on_every_replica_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    """Half of the global batch twice: what torch's loader over an ``IterableDataset`` gives."""
    for said in two_ranks.run(train, tmp_path / "refused", "iterable", ("batches", 2)):
        assert "Seeing.build_training_data_loader: returned torch's DataLoader over Sized" in said
        assert "return self.training_loader(dataset)" in said
    first, second = two_ranks.run(train, tmp_path / "taken", "iterable", ("batches", 2), opt_in=True)
    assert first == second == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert "is used as it is" in two_ranks.said(0)
    assert "is used as it is" not in two_ranks.said(1)


def test_a_stream_that_splits_itself_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    for said in two_ranks.run(train, tmp_path, "split", ("batches", 2)):
        assert "sharded=True" in said
