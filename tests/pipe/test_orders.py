"""Schedules of pipelines: complete, without deadlock, as their authors define them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from tests.package import order
from tests.pipe.steps import (
    DUALPIPEV,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB_H1,
    Op,
    Step,
    most_held,
    simulated,
    steps,
)


@given(steps())
def test_every_pass_is_computed_once_by_the_rank_that_holds_the_part_and_none_waits_forever(
    step: Step,
) -> None:
    kinds = ("F", "I", "W") if step.schedule == ZB_H1 else ("F", "B")
    expected = {
        (kind, part, micro_batch)
        for kind in kinds
        for part in range(step.parts)
        for micro_batch in range(step.micro_batches)
    }
    spans = simulated(step.orders, step.parts)
    ops = [op for rank in spans for op, *_ in rank]
    assert len(ops) == len(expected)
    assert set(ops) == expected
    for rank, own in enumerate(spans):
        assert {step.holder(op[1]) for op, *_ in own} == {rank}


@given(steps(ONE_F_ONE_B))
def test_1f1b_holds_as_many_micro_batches_as_deepspeed_has_buffers_and_gpipe_all(step: Step) -> None:
    """Of which DeepSpeed has two at least."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    p, m = step.ranks, step.micro_batches
    found = most_held(step.orders)
    assert found == [min(p - rank, m) for rank in range(p)]
    schedules = [TrainSchedule(micro_batches=m, stages=p, stage_id=rank) for rank in range(p)]
    assert [max(2, most) for most in found] == [each.num_pipe_buffers() for each in schedules]
    assert most_held(order(GPIPE, p, m)) == [m] * p


@given(steps(INTERLEAVED))
def test_interleaved_is_that_of_torch(step: Step) -> None:
    from torch.distributed.pipelining import schedules

    for rank, own in enumerate(step.orders):
        if step.chunks == 1:
            continue  # torch's has two forward passes ahead for each rank after it
        made = object.__new__(schedules.ScheduleInterleaved1F1B)
        made.pp_group_size, made.n_local_stages = step.ranks, step.chunks
        made._n_microbatches, made.microbatches_per_round = step.micro_batches, step.ranks
        assert own == list(_of_torch(made._calculate_single_rank_operations(rank)))


@given(steps(ZB_H1))
def test_zb_h1_is_that_of_torch(step: Step) -> None:
    from torch.distributed.pipelining import schedules

    for rank, own in enumerate(step.orders):
        made = object.__new__(schedules.ScheduleInterleavedZeroBubble)
        made.pp_group_size, made.n_local_stages = step.ranks, 1
        made._n_microbatches, made.microbatches_per_round = step.micro_batches, step.micro_batches
        assert own == list(_of_torch(made._calculate_single_rank_operations(rank)))


def _of_torch(actions: list[object]) -> Iterator[Op]:
    for action in actions:
        if action is not None:
            part, kind, micro_batch = action[:3]  # type: ignore[index]
            yield kind.value, part, micro_batch


@given(steps(DUALPIPEV))
def test_dualpipev_is_that_of_deepspeed(step: Step) -> None:
    from deepspeed.runtime.pipe import schedule

    kinds = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}
    for rank, own in enumerate(step.orders):
        made = schedule.DualPipeVSchedule(micro_batches=step.micro_batches, stages=step.ranks, stage_id=rank)
        found = [
            (kinds[type(each)], each.phase, each.buffer_id % step.micro_batches)
            for instructions in made
            for each in instructions
            if type(each) in kinds
        ]
        assert [(kind, int(part >= step.ranks), batch) for kind, part, batch in own] == found


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        (("1f2b", 2, 4), "must be one of"),
        ((DUALPIPEV, 2, 3, 2), "at least 4, not 3"),
        ((DUALPIPEV, 2, 4), "2 chunks a rank, not 1"),
        ((GPIPE, 2, 4, 2), "1 chunk a rank, not 2"),
        ((INTERLEAVED, 2, 3, 2), "multiple of 2"),
    ],
)
def test_numbers_without_an_order_are_refused(numbers: tuple[str, int, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        order(*numbers)
