"""Loaders that are not Determined's are taken over, refused with the fix, or used as they are where allowed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from determined.pytorch import samplers
from torch.utils import data as torch_data

from determined_ds.errors import ConfigError
from tests.harness.ranks import Ranks
from tests.package import training_data
from tests.train.data.datasets import Count, Sized, taken
from tests.train.small import fit, hyperparameters

SPLIT = (2, 2, 2)
NUMBERS: Any = range(35)


class OwnIteration(torch_data.DataLoader):
    def __iter__(self) -> Any:
        return iter([])


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
        (OwnIteration(NUMBERS), "OwnIteration over range"),
        (None, "returned NoneType, which is no data loader"),
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
