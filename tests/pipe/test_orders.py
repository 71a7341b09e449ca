"""Schedules of pipelines: complete, without deadlock, as their authors define them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from determined_ds.pipe.orders import (
    BACKWARD,
    DUALPIPEV,
    FORWARD,
    GPIPE,
    INPUT,
    INTERLEAVED,
    ONE_F_ONE_B,
    WEIGHT,
    ZB_H1,
    Op,
    Pipeline,
)
from determined_ds.pipe.timeline import most_held, timeline
from tests.pipe.drawn import pipelines


@given(pipelines())
def test_every_pass_is_computed_once_by_the_rank_that_holds_the_part_and_none_waits_forever(
    pipe: Pipeline,
) -> None:
    kinds = (FORWARD, INPUT, WEIGHT) if pipe.schedule == ZB_H1 else (FORWARD, BACKWARD)
    expected = {
        Op(kind, part, micro_batch)
        for kind in kinds
        for part in range(pipe.parts)
        for micro_batch in range(pipe.micro_batches)
    }
    spans = timeline(pipe)
    ops = [span.op for rank in spans for span in rank]
    assert len(ops) == len(expected)
    assert set(ops) == expected
    for rank, own in enumerate(spans):
        assert {pipe.rank_of(span.op.part) for span in own} == {rank}


@given(pipelines(ONE_F_ONE_B))
def test_1f1b_holds_the_micro_batches_on_their_way_to_the_end_and_gpipe_all(pipe: Pipeline) -> None:
    p, m = pipe.ranks, pipe.micro_batches
    assert most_held(pipe) == [min(p - rank, m) for rank in range(p)]
    assert most_held(Pipeline(schedule=GPIPE, ranks=p, micro_batches=m)) == [m] * p


@given(pipelines(INTERLEAVED))
def test_interleaved_is_that_of_torch(pipe: Pipeline) -> None:
    from torch.distributed.pipelining import schedules

    for rank, order in enumerate(pipe.orders()):
        if pipe.chunks == 1:
            continue  # torch's has two forward passes ahead for each rank after it
        made = object.__new__(schedules.ScheduleInterleaved1F1B)
        made.pp_group_size, made.n_local_stages = pipe.ranks, pipe.chunks
        made._n_microbatches, made.microbatches_per_round = pipe.micro_batches, pipe.ranks
        assert order == list(_of_torch(made._calculate_single_rank_operations(rank)))


@given(pipelines(ZB_H1))
def test_zb_h1_is_that_of_torch(pipe: Pipeline) -> None:
    from torch.distributed.pipelining import schedules

    for rank, order in enumerate(pipe.orders()):
        made = object.__new__(schedules.ScheduleInterleavedZeroBubble)
        made.pp_group_size, made.n_local_stages = pipe.ranks, 1
        made._n_microbatches, made.microbatches_per_round = pipe.micro_batches, pipe.micro_batches
        assert order == list(_of_torch(made._calculate_single_rank_operations(rank)))


@given(pipelines(DUALPIPEV))
def test_dualpipev_is_that_of_deepspeed(pipe: Pipeline) -> None:
    from deepspeed.runtime.pipe import schedule

    kinds = {schedule.ForwardPass: FORWARD, schedule.BackwardPass: BACKWARD}
    for rank, order in enumerate(pipe.orders()):
        steps = schedule.DualPipeVSchedule(micro_batches=pipe.micro_batches, stages=pipe.ranks, stage_id=rank)
        found = [
            (kinds[type(each)], each.phase, each.buffer_id % pipe.micro_batches)
            for step in steps
            for each in step
            if type(each) in kinds
        ]
        assert [(op.kind, int(op.part >= pipe.ranks), op.micro_batch) for op in order] == found


def _of_torch(actions: list[object]) -> Iterator[Op]:
    for action in actions:
        if action is not None:
            part, kind, micro_batch = action[:3]  # type: ignore[index]
            yield Op(kind.value, part, micro_batch)


@pytest.mark.parametrize(
    ("pipe", "why"),
    [
        (Pipeline(schedule="1f2b", ranks=2, micro_batches=4), "must be one of"),
        (Pipeline(schedule=DUALPIPEV, ranks=2, micro_batches=3, chunks=2), "at least 4, not 3"),
        (Pipeline(schedule=DUALPIPEV, ranks=2, micro_batches=4), "2 chunks a rank, not 1"),
        (Pipeline(schedule=GPIPE, ranks=2, micro_batches=4, chunks=2), "1 chunk a rank, not 2"),
        (Pipeline(schedule=INTERLEAVED, ranks=2, micro_batches=3, chunks=2), "multiple of 2"),
    ],
)
def test_numbers_without_an_order_are_refused(pipe: Pipeline, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pipe.orders()
