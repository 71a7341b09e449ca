"""Schedules of pipelines: complete, without deadlock, as their authors define them; their bubbles are exact.

What ranks wait is stated beside the time of all passes, as in the papers; as a share of both together it is the bubble.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.package import bubble, order, recorded_step
from tests.pipe.steps import UNITS, Op, Step, simulated, step_time, steps

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


@given(steps("1f1b"))
def test_1f1b_holds_as_many_micro_batches_as_deepspeed_has_buffers(step: Step) -> None:
    """Of which DeepSpeed has two at least."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    p, m = step.ranks, step.micro_batches
    for rank, ops in enumerate(step.orders):
        held = [{"F": 1, "B": -1}[kind] for kind, *_ in ops]
        most = max(sum(held[: end + 1]) for end in range(len(held)))
        schedule = TrainSchedule(micro_batches=m, stages=p, stage_id=rank)
        assert most == min(p - rank, m)
        assert max(2, most) == schedule.num_pipe_buffers()


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


def test_numbers_without_an_order_are_refused() -> None:
    for numbers in (
        ("dualpipev", 2, 3, 2),
        ("dualpipev", 2, 4),
        ("gpipe", 2, 4, 2),
        ("interleaved", 2, 3, 2),
    ):
        with pytest.raises(ValueError, match=r"not [1-4]"):
            order(*numbers)


# ------------------------------------------------------------------------------------------- bubbles


def waited(step: Step, **seconds: int) -> Fraction:
    """Seconds that each rank waits of a step; all wait alike."""
    spans = simulated(step, lambda op: seconds[op[0]])
    [waits] = {step_time(spans) - sum(end - start for _, start, end in own) for own in spans}
    return Fraction(waits)


@given(steps(), times, times, times)
def test_ranks_wait_as_long_as_the_papers_say(step: Step, f: int, b: int, w: int) -> None:
    """Of passes of any length: forward, backward (or its half for the inputs), its half for the weights.

    gpipe, 1f1b, interleaved: (p-1)/m of the ideal time, 1/V of that with V chunks (arXiv 1811.06965, 2104.04473
    section 2.2). zb-h1: (p-1)(F+I-W) with W the shortest and m >= p (arXiv 2401.10241 section 2.3); longer weight
    passes do more than fill the gaps, and with fewer micro-batches there are too few of them. dualpipev: its authors
    state (p-1)(F&B+B-3W) for passes that overlap and late weight gradients; DeepSpeed's has neither, and waits for the
    longest of three ways through the V.
    """
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


def test_uneven_parts_are_planned_as_long_as_they_were() -> None:
    """The second rank's passes take twice the time; one of them, once, ten times. Loading is work, and not planned."""
    step = Step("1f1b", 2, 8)

    def cost(op: Op) -> float:
        return (1 + op[1]) * (1 if op[0] == "F" else 2)

    late = simulated(step, lambda op: 20 if op == ("F", 1, 3) else cost(op))
    first = late[0][0][1]
    late[0].insert(0, (("L", 0, 0), first - 1, first))
    found = recorded_step(step, late)
    assert found["spans"][0][0] == (("L", 0, 0), 0, 1)
    assert found["planned"] == simulated(step, cost)
    assert recorded_step(step, [late[0], []]) == {}
