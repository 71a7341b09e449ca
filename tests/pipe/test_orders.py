"""Schedules of pipelines: complete, without deadlock, as their authors define them; bubbles are exact, cuts good."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tests.package import bubble, cut_by_times, order, timeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}  # how long passes take; a backward pass whole, or its two halves

Op = tuple[str, int, int]  # kind, part of the model, micro-batch
Spans = list[list[tuple[Op, float, float]]]  # of each rank: a pass, its start and end


class Step(NamedTuple):
    """An optimizer step of a pipeline."""

    schedule: str
    ranks: int
    micro_batches: int
    chunks: int = 1

    @property
    def parts(self) -> int:
        return self.ranks * self.chunks

    @property
    def orders(self) -> list[list[Op]]:
        return order(*self)


@st.composite
def steps(draw: st.DrawFn, *schedules: str) -> Step:
    """Any step that a schedule has an order for."""
    schedule, ranks = draw(st.sampled_from(schedules or SCHEDULES)), draw(st.integers(1, 6))
    chunks = {"interleaved": draw(st.integers(1, 4)), "dualpipev": 2}.get(schedule, 1)
    micro_batches = draw(st.integers(1, 16))
    if schedule == "dualpipev":
        micro_batches += 2 * ranks - 1
    if schedule == "interleaved" and chunks > 1:
        micro_batches = ranks * draw(st.integers(1, 4))
    return Step(schedule, ranks, micro_batches, chunks)


def simulated(step: Step, cost: Callable[[Op], float] = lambda op: UNITS[op[0]]) -> Spans:
    """When passes run, each as soon as its rank is free and its inputs are there; sending takes no time."""
    return timeline(*step, cost=cost)


def step_time(spans: Spans) -> float:
    """From the first start to the last end."""
    return max(own[-1][2] for own in spans)


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


STEPS = [Step("1f1b", 2, 4), Step("1f1b", 4, 8), Step("gpipe", 3, 6), Step("zb-h1", 3, 6)]
STEPS += [Step("interleaved", 2, 4, 2), Step("dualpipev", 2, 4, 2)]


def time_of(seconds: list[float], starts: Sequence[int], step: Step) -> float:
    """Of a step, by the seconds of each layer and where each part starts; backward takes twice as long."""
    parts = [sum(seconds[a:b]) for a, b in itertools.pairwise([*starts, len(seconds)])]
    return step_time(simulated(step, lambda op: UNITS[op[0]] * parts[op[1]]))


def test_of_twenty_models_nineteen_are_cut_within_a_tenth_of_the_best_there_is() -> None:
    drawn, ratios = random.Random(0), []
    for _ in range(10):
        for step in STEPS:
            seconds = [float(drawn.randint(1, 50)) for _ in range(drawn.randint(4, 9))]
            every_cut = itertools.combinations(range(1, len(seconds)), step.parts - 1)
            best = min(time_of(seconds, (0, *each), step) for each in every_cut)
            cut = cut_by_times([(each, 2 * each) for each in seconds], *step)
            ratios.append(time_of(seconds, cut, step) / best)
    assert sum(ratio <= 1.1 for ratio in ratios) >= 0.95 * len(ratios), sorted(ratios)[-4:]
