"""Schedules of pipelines: complete, without deadlock, as their authors define them; their bubbles are exact."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from tests.package import bubble
from tests.pipe.steps import UNITS, Step, simulated, step_time, steps

times = st.integers(1, 50)


@given(steps())
def test_every_pass_is_computed_once_by_the_rank_that_holds_the_part_and_none_waits_forever(
    step: Step,
) -> None:
    kinds = ("F", "I", "W") if step.schedule == "zb-h1" else ("F", "B")
    batches, last = range(step.micro_batches), step.parts - 1
    expected = {(kind, part, batch) for kind in kinds for part in range(step.parts) for batch in batches}
    ops = [(op, rank) for rank, own in enumerate(simulated(step)) for op, *_ in own]
    assert len(ops) == len(expected)
    assert {op for op, _ in ops} == expected
    for (_, part, _), rank in ops:  # DualPipeV folds the parts into a V, the others go round
        assert rank == (min(part, last - part) if step.schedule == "dualpipev" else part % step.ranks)


@given(steps("interleaved", "zb-h1"))
def test_interleaved_and_zb_h1_are_those_of_torch(step: Step) -> None:
    from torch.distributed.pipelining import schedules

    if step.schedule == "interleaved" and step.chunks == 1:
        return  # torch's has two forward passes ahead for each rank after it
    is_zb = step.schedule == "zb-h1"
    kind = schedules.ScheduleInterleavedZeroBubble if is_zb else schedules.ScheduleInterleaved1F1B
    for rank, own in enumerate(step.orders):
        made = object.__new__(kind)
        made.pp_group_size, made.n_local_stages = step.ranks, step.chunks
        made._n_microbatches = step.micro_batches
        made.microbatches_per_round = step.micro_batches if is_zb else step.ranks
        actions = made._calculate_single_rank_operations(rank)  # of a part, a kind and a micro-batch
        assert own == [(kind.value, part, batch) for part, kind, batch, *_ in filter(None, actions)]


@given(steps("dualpipev"))
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


def waited(step: Step, **seconds: int) -> Fraction:
    """Seconds that each rank waits of a step; all wait alike."""
    spans = simulated(step, lambda op: seconds[op[0]])
    [waits] = {step_time(spans) - sum(end - start for _, start, end in own) for own in spans}
    return Fraction(waits)


@given(steps(), times, times, times)
def test_ranks_wait_as_long_as_the_papers_say(step: Step, f: int, b: int, w: int) -> None:
    """gpipe to interleaved: arXiv 1811.06965, 2104.04473; zb-h1: 2401.10241, W the shortest."""
    p, m = step.ranks, step.micro_batches
    found = waited(step, F=f, B=b, I=b, W=w)
    if step.schedule == "zb-h1":
        if m >= p:
            assert found == max((p - 1) * (f + b - w), (p - 1) * f, (p - 1) * b)
        elif w <= min(f, b):
            assert found == (p - 1) * (f + b - w) + (p - m) * w
    elif step.schedule == "dualpipev":
        assert found == (max(2 * (p - 1) * b - f, (p - 1) * (f + b), 2 * (p - 1) * f) if p > 1 else 0)
    else:
        assert found / (step.chunks * m * (f + b)) == Fraction(p - 1, step.chunks * m)


@given(steps())
def test_the_bubble_is_what_the_passes_make_to_the_last_bit(step: Step) -> None:
    exact = waited(step, **UNITS) / Fraction(step_time(simulated(step)))
    assert abs(bubble(*step) - exact) < Fraction(1, 2**52)  # a float's last bit
