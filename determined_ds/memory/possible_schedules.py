"""Schedules that a pipeline could have with the same stages and micro-batches: what each waits, and what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from determined_ds.config.strategy import Strategy
from determined_ds.memory.estimate import Memory, memory_of_stages
from determined_ds.memory.model_shape import ModelShape
from determined_ds.pipe.orders import INTERLEAVED, SCHEDULES, default_chunks
from determined_ds.pipe.timeline import most_held

CHUNKS = (2, 4)  # of a rank, that are looked at


@dataclass(frozen=True, kw_only=True)
class ScheduleFit:
    """A schedule of a pipeline.

    Args:
        strategy: The strategy with this schedule.
        bubble: Share of time in which stages wait, by the schedule alone.
        most_held: The most micro-batches whose activations each stage holds, each of one part.
        stages: Bytes of a rank of each stage.
    """

    strategy: Strategy
    bubble: float
    most_held: tuple[int, ...]
    stages: tuple[Memory, ...]


def schedule_fits(shape: ModelShape, strategy: Strategy) -> list[ScheduleFit]:
    """The schedules that are possible; none without a pipeline.

    Args:
        shape: Of the model; it must have a layer for each part.
        strategy: With its stages and micro-batches.
    """
    if strategy.pipe_parallel_size < 2:
        return []
    layers = len(shape.layers) or shape.num_layers
    return [
        ScheduleFit(
            strategy=each,
            bubble=each.bubble,
            most_held=tuple(most_held(each.pipeline)),
            stages=tuple(memory_of_stages(shape, each)),
        )
        for each in _strategies(strategy)
        if not each.pipeline.problem() and (each.pipeline.parts <= layers or each == strategy)
    ]


def _strategies(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy under every schedule, its own chunks among them."""
    for schedule in SCHEDULES:
        chunks = {default_chunks(schedule)}
        if schedule == INTERLEAVED:
            chunks |= {*CHUNKS, strategy.pipe_chunks} - {1}
        for each in sorted(chunks):
            yield replace(strategy, pipe_schedule=schedule, pipe_chunks=each)
