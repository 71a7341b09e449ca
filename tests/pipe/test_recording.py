"""A recorded step: its clocks are aligned, and it is compared with what its schedule plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.pipe.orders import SCHEDULES, Op, Pipeline
from determined_ds.pipe.recording import LOAD, recorded_step
from determined_ds.pipe.timeline import Span, bubble, timeline


def of(schedule: str, ranks: int = 4, chunks: int = 2) -> Pipeline:
    several = schedule in ("interleaved", "dualpipev")
    return Pipeline(schedule=schedule, ranks=ranks, micro_batches=8, chunks=chunks if several else 1)


def shifted(spans: list[list[Span]], by: list[float]) -> list[list[Span]]:
    return [
        [Span(op=span.op, start=span.start + offset, end=span.end + offset) for span in own]
        for own, offset in zip(spans, by, strict=True)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_one_machine_times_stay_and_begin_at_zero(schedule: str) -> None:
    pipe = of(schedule)
    spans = timeline(pipe)
    step = recorded_step(pipe, shifted(spans, [1000.25] * 4), ["here"] * 4)
    assert step is not None
    assert step.machines == 1
    assert [list(own) for own in step.spans] == spans
    assert step.bubble == pytest.approx(bubble(spans))
    assert step.seconds == max(own[-1].end for own in spans)
    assert step.planned() == spans


@given(st.sampled_from(SCHEDULES), st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=2))
def test_clocks_of_several_machines_are_aligned_by_what_passes_wait_for(
    schedule: str, offsets: list[float]
) -> None:
    """Ranks 0 and 1 on one, the others each on their own, in a step where messages take no time."""
    pipe = of(schedule)
    spans = timeline(pipe)
    by = [0.0, 0.0, *offsets]
    step = recorded_step(pipe, shifted(spans, by), ["a", "a", "b", "c"])
    assert step is not None
    assert step.machines == 3
    for own, found in zip(spans, step.spans, strict=True):
        assert [span.op for span in found] == [span.op for span in own]
        # A schedule that never waits for one of the two directions leaves some play.
        assert [span.start for span in found] == pytest.approx([span.start for span in own], abs=1.1)


def test_loading_is_work_and_planned_by_no_schedule() -> None:
    pipe = of("1f1b", ranks=2)
    spans = timeline(pipe)
    loads = [Span(op=Op(LOAD, 0, 0), start=spans[0][0].start - 1, end=spans[0][0].start), *spans[0]]
    step = recorded_step(pipe, [loads, spans[1]], ["here", "here"])
    assert step is not None
    assert step.spans[0][0].start == 0
    assert step.planned() == spans


def test_uneven_parts_are_planned_as_long_as_they_were() -> None:
    """The second rank's passes take twice the time; one of them, once, ten times."""
    pipe = of("1f1b", ranks=2)

    def cost(op: Op) -> float:
        return (1 + op.part) * (1 if op.kind == "F" else 2)

    late = timeline(pipe, lambda op: 20 if op == Op("F", 1, 3) else cost(op))
    step = recorded_step(pipe, late, ["here", "here"])
    assert step is not None
    assert step.planned() == timeline(pipe, cost)
    assert step.bubble != pytest.approx(bubble(step.planned()))


def test_nothing_is_a_step_where_a_rank_has_nothing() -> None:
    pipe = of("1f1b", ranks=2)
    assert recorded_step(pipe, [timeline(pipe)[0], []], ["here", "here"]) is None
