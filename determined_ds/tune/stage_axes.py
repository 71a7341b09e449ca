"""The choices that ``det-ds autotune`` has of a pipeline alone: its schedule, its chunks, where its layers are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from determined_ds.pipe.orders import (
    DUALPIPEV,
    INTERLEAVED,
    ONE_F_ONE_B,
    ZB_H1,
    default_chunks,
)
from determined_ds.pipe.partition import MEASURED
from determined_ds.tune.choice import Base, Choice

ORDER, CHUNKS, PARTITION = "pipe_schedule", "pipe_chunks", "partition_method"
# gpipe takes as long as 1f1b, and holds more.
TRIED = (ONE_F_ONE_B, INTERLEAVED, ZB_H1, DUALPIPEV)
CHUNKS_TRIED = (2, 4)


@dataclass(frozen=True, kw_only=True)
class Left:
    """An axis that is not searched, and why.

    Args:
        axis: Of :data:`determined_ds.tune.axes.AXES`.
        reason: In a sentence.
    """

    axis: str
    reason: str


def orders_of(base: Base, form: Choice, over: Sequence[str]) -> tuple[tuple[str | None, int | None], ...]:
    """(schedule, chunks) that a choice may have; None: as the experiment has it."""
    if form.pipe_parallel_size == 1 or base.experiment.script is not None:
        return ((None, None),)
    own = base.resolved.strategy
    found: dict[tuple[str, int], tuple[str | None, int | None]] = {
        (own.pipe_schedule, own.pipe_chunks): (None, None)
    }
    for schedule in TRIED if ORDER in over else (own.pipe_schedule,):
        chunks = CHUNKS_TRIED if schedule == INTERLEAVED and CHUNKS in over else (default_chunks(schedule),)
        for number in chunks:
            stated = None if number == default_chunks(schedule) else number
            found.setdefault((schedule, number), (schedule, stated))
    return tuple(found.values())


def partitions_of(base: Base, form: Choice, over: Sequence[str]) -> tuple[str | None, ...]:
    """How the layers of a choice may be shared out; None: as the experiment has it."""
    is_own = base.resolved.strategy.partition_method == MEASURED
    if PARTITION not in over or form.pipe_parallel_size == 1 or base.experiment.script is not None or is_own:
        return (None,)
    return (None, MEASURED)


def unordered(base: Base, forms: Sequence[Choice], over: Sequence[str]) -> Iterator[Left]:
    """The axes of a pipeline that are not searched, each with its reason."""
    schedule = base.resolved.strategy.pipe_schedule
    for axis in (axis for axis in (ORDER, CHUNKS, PARTITION) if axis in over):
        if base.experiment.script is not None:
            yield Left(axis=axis, reason="a script trains by the engine that it builds")
        elif all(form.pipe_parallel_size == 1 for form in forms):
            yield Left(axis=axis, reason="no pipeline is searched")
        elif axis == CHUNKS and schedule != INTERLEAVED and ORDER not in over:
            reason = f"{schedule} has {default_chunks(schedule)} a rank; search over {ORDER} too"
            yield Left(axis=axis, reason=reason)
        elif axis == PARTITION and base.resolved.strategy.partition_method == MEASURED:
            yield Left(axis=axis, reason="the experiment's layers are shared out by their times already")


def order_words(choice: Choice) -> Iterator[str]:
    """What a choice has of these, in words."""
    if choice.pipe_schedule is not None:
        yield choice.pipe_schedule
    if choice.pipe_chunks is not None:
        yield f"{choice.pipe_chunks} chunks"
    if choice.partition_method is not None:
        yield f"{choice.partition_method} layers"
