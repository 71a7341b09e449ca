"""The choice that ``det-ds autotune`` has of a pipeline alone: its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from determined_ds.pipe.orders import DUALPIPEV, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from determined_ds.tune.choice import Base, Choice

ORDER = "pipe_schedule"
# gpipe takes as long as 1f1b, and holds more.
TRIED = (ONE_F_ONE_B, INTERLEAVED, ZB_H1, DUALPIPEV)


@dataclass(frozen=True, kw_only=True)
class Left:
    """An axis that is not searched, and why.

    Args:
        axis: Of :data:`determined_ds.tune.axes.AXES`.
        reason: In a sentence.
    """

    axis: str
    reason: str


def schedules_of(base: Base, form: Choice, over: Sequence[str]) -> tuple[str | None, ...]:
    """The schedules that a choice may have; None: as the experiment has it."""
    if ORDER not in over or form.pipe_parallel_size == 1 or base.experiment.script is not None:
        return (None,)
    own = base.resolved.strategy.pipe_schedule
    return (None, *(schedule for schedule in TRIED if schedule != own))


def unordered(base: Base, forms: Sequence[Choice], over: Sequence[str]) -> Iterator[Left]:
    """The schedule, where it is not searched, and why."""
    if ORDER in over and base.experiment.script is not None:
        yield Left(axis=ORDER, reason="a script trains by the engine that it builds")
    elif ORDER in over and all(form.pipe_parallel_size == 1 for form in forms):
        yield Left(axis=ORDER, reason="no pipeline is searched")
