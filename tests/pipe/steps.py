"""Steps of pipelines for properties: any schedule that has an order, and when its passes run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import strategies as st

from tests.package import order, timeline

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
