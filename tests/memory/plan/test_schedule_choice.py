"""The schedule of a planned pipeline: the one in which its stages wait least, of those that can run and fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from determined_ds.memory.plan.choose import choose_plan
from determined_ds.memory.plan.needs import read_needs
from determined_ds.memory.plan.schedule_choice import schedule_in_words, with_schedule
from tests.memory.plan.test_plan import ISSUE, files, plain, planned


@pytest.mark.parametrize(
    ("changes", "schedule", "chunks", "words"),
    [
        ({}, "zb-h1", 1, "by count its stages wait 11% of the time"),
        ({"activation_checkpointing": True}, "interleaved", 4, "1f1b 27%"),
        ({"num_layers": 8}, "interleaved", 2, "1f1b 27%"),
        ({"num_layers": 4}, "1f1b", 1, "27% of the time"),
        ({"micro_batches": 2}, "zb-h1", 1, "1f1b 60%"),
    ],
)
def test_a_pipelines_schedule_is_the_one_that_waits_least(
    changes: dict[str, Any], schedule: str, chunks: int, words: str
) -> None:
    """Of those that the layers and the micro-batches make, that rules accept, and that fit."""
    plan = planned(pipeline=4)
    checkpointing = changes.get("activation_checkpointing", "num_layers" in changes)
    layers = changes.get("num_layers", plan.needs.shape.num_layers)
    needs = dataclasses.replace(
        plan.needs, shape=dataclasses.replace(plan.needs.shape, num_layers=layers), gpu_memory_bytes=2**50
    )
    strategy = dataclasses.replace(
        plain(plan.strategy),
        activation_checkpointing=checkpointing,
        accumulation=changes.get("micro_batches", 8),
    )
    found, others = with_schedule(needs, strategy)
    assert (found.pipe_schedule, found.pipe_chunks) == (schedule, chunks)
    assert found.partition_method == "measured"
    assert words in schedule_in_words(needs, found, others)[1]


def test_a_schedule_that_does_not_fit_is_not_taken() -> None:
    plan = planned(pipeline=4)
    tight = dataclasses.replace(plan.needs, gpu_memory_bytes=2**20)
    found, rejected = with_schedule(tight, plain(plan.strategy))
    assert found.pipe_schedule == "1f1b"
    assert rejected
    assert not any(each.fits for each in rejected)
    assert "does not fit" in schedule_in_words(tight, found, rejected)[1]


def test_a_script_keeps_the_schedule_of_its_engine() -> None:
    needs = dataclasses.replace(read_needs(**{**ISSUE, "pipeline": 4}), is_script=True)
    plan = choose_plan(needs)
    assert plan.strategy.pipe_schedule == "1f1b"
    assert plan.strategy.partition_method is None
    assert "--entrypoint is a script" in plan.choice("pipe_schedule").reason
    assert "pipe_schedule" not in files(plan, "train.py").experiment
