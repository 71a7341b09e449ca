"""What ranks hold of a step: as many micro-batches as the schedule has under way, in parts of any sizes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from determined_ds.pipe.bytes_held import SETTLED, PartBytes, most_bytes
from determined_ds.pipe.orders import GPIPE, ONE_F_ONE_B, SCHEDULES, Pipeline
from determined_ds.pipe.timeline import most_held
from tests.pipe.drawn import pipelines

KEPT = PartBytes(kept=1, forward=1, backward=1, split=1, input_pass=1, weight_pass=1)


@given(pipelines())
def test_of_parts_alike_they_are_the_micro_batches_under_way(pipe: Pipeline) -> None:
    assert most_bytes(pipe, [KEPT] * pipe.parts) == most_held(pipe)


@given(pipelines(*(set(SCHEDULES) - {GPIPE})), st.integers(1, 4))
def test_more_micro_batches_than_a_few_a_rank_are_never_under_way(pipe: Pipeline, times: int) -> None:
    few = replace(pipe, micro_batches=SETTLED * pipe.ranks)
    many = replace(pipe, micro_batches=(SETTLED + times) * pipe.ranks)
    assert most_held(few) == most_held(many)


@given(pipelines(ONE_F_ONE_B))
def test_1f1b_holds_as_many_as_deepspeed_has_buffers(pipe: Pipeline) -> None:
    """Of which it has two at least."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    for rank, most in enumerate(most_bytes(pipe, [KEPT] * pipe.parts)):
        schedule = TrainSchedule(micro_batches=pipe.micro_batches, stages=pipe.ranks, stage_id=rank)
        assert max(2, most) == schedule.num_pipe_buffers()


@given(pipelines(), st.data())
def test_a_part_that_keeps_more_is_held_where_it_is(pipe: Pipeline, data: st.DataObject) -> None:
    """The ranks that do not have it hold what they held."""
    large = data.draw(st.integers(0, pipe.parts - 1))
    more = replace(KEPT, kept=5, forward=5, backward=5, split=5, input_pass=5, weight_pass=5)
    parts = [more if part == large else KEPT for part in range(pipe.parts)]
    for rank, (before, after) in enumerate(zip(most_held(pipe), most_bytes(pipe, parts), strict=True)):
        assert after > before if rank == pipe.rank_of(large) else after == before
