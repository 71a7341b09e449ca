"""Ranks share the sequences of a planned training where there are more ranks than sequences, or none fits."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.memory.plan.needs import possible_splits
from tests.making import refusal
from tests.memory.plan.test_plan import decided, files, planned

MODEL: dict[str, Any] = {"model_size": "355M", "gpus": 8, "gpu_memory": "24GiB", "num_heads": 16}
LONG: dict[str, Any] = {**MODEL, "sequence_length": 131072}


@pytest.mark.parametrize(
    ("layout", "splits"),
    [
        ((8, 1, 8, 1), (1,)),
        ((8, 1, 8, 16), (1, 2, 4, 8)),
        ((8, 1, 2, 16), (4, 8)),  # more ranks than sequences
        ((8, 1, 2, 2), ()),
        ((8, 1, 12, 16), ()),  # fewer: replicas have to divide them
        ((8, 2, 8, 16), (1,)),
    ],
)
def test_the_possible_numbers_of_ranks(layout: tuple[int, int, int, int], splits: tuple[int, ...]) -> None:
    assert possible_splits(*layout) == splits


def test_more_ranks_than_sequences_share_them() -> None:
    plan = planned(**{**MODEL, "sequence_length": 1024}, global_batch_size=2)
    assert (plan.strategy.sequence_parallel_size, plan.strategy.replicas) == (4, 2)
    assert "a step has 2 sequences, fewer than the 8 GPUs" in plan.choice("sequence_parallel_size").reason
    assert "8 GPUs / 1 stage / 4 to a sequence = 2 replicas" in plan.choice("pipe_parallel_size").reason
    assert "sequence_parallel_size: 4" in files(plan).experiment
    assert decided(plan)[1].strategy == plan.strategy


def test_a_sequence_that_does_not_fit_is_shared_by_as_few_as_it_takes() -> None:
    plan = planned(**LONG, global_batch_size=8)
    strategy = plan.strategy
    assert strategy.sequence_parallel_size == 4
    assert strategy.activation_checkpointing
    assert "for one whole sequence a rank would need" in plan.choice("sequence_parallel_size").reason
    # A trial of whole sequences is refused in place of it.
    assert refusal(lambda: planned(**{**LONG, "num_heads": 1}, global_batch_size=8)).code == "nothing-fits"


def test_no_other_training_has_its_sequences_cut() -> None:
    plan = planned(**{**MODEL, "sequence_length": 1024}, global_batch_size=64)
    assert plan.strategy.sequence_parallel_size == 1
    assert "sequence_parallel_size" not in files(plan).experiment
