"""What each row is best for, and where measurements do not distinguish rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from determined_ds.report.results import Results, Row

Interval = tuple[float, float]
ONCE = 0.05  # assumed spread of a speed that was measured once, relative
ALIKE = 1.01  # sizes and losses that differ by less are the same


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Something that a strategy may be best for.

    Args:
        name: As people read it.
        value: Of a row, a finite number; None where it is not known.
        spread: Lowest and highest of a row's repetitions; of a row that has a value.
        larger: Whether the larger value is the better.
    """

    name: str
    value: Callable[[Results, Row], float | None]
    spread: Callable[[Results, Row], Interval]
    larger: bool = False

    def best(self, results: Results) -> tuple[Row, ...]:
        """The best row first, then those that cannot be distinguished from it; empty where no row has a value."""
        known = [(value, row) for row in results.measured if (value := self._known(results, row)) is not None]
        if not known:
            return ()
        choose = max if self.larger else min
        _, best = choose(known, key=lambda pair: pair[0])
        tied = [row for _, row in known if row is not best and self.is_tied(results, row, best)]
        return best, *tied

    def is_tied(self, results: Results, row: Row, best: Row) -> bool:
        """Whether the spreads of two rows meet."""
        (low, high), (its_low, its_high) = (self.spread(results, each) for each in (row, best))
        return low <= its_high and its_low <= high

    def num_known(self, results: Results) -> int:
        """Rows that have a value."""
        return sum(self._known(results, row) is not None for row in results.measured)

    def _known(self, results: Results, row: Row) -> float | None:
        value = self.value(results, row)
        return value if value is not None and math.isfinite(value) else None


def best_for(results: Results, row: Row) -> tuple[str, ...]:
    """What a row is best for; ``speed (tied)`` where it shares that with some others.

    Nothing that all rows share: they do not differ in it.

    Args:
        results: Those that it is one of.
        row: One that was measured, or not.
    """
    found = []
    for quality in QUALITIES:
        best = quality.best(results)
        if any(each is row for each in best) and not _is_shared_by_all(quality, results, best):
            found.append(f"{quality.name} (tied)" if len(best) > 1 else quality.name)
    return tuple(found)


def without_winner(results: Results) -> tuple[str, ...]:
    """Names of the qualities in which the measured rows do not differ by more than their spread."""
    return tuple(
        quality.name
        for quality in QUALITIES
        if quality.num_known(results) > 1 and _is_shared_by_all(quality, results, quality.best(results))
    )


def _is_shared_by_all(quality: Quality, results: Results, best: tuple[Row, ...]) -> bool:
    return len(best) == quality.num_known(results)


# ---------------------------------------------------------------------------------------------- the qualities


def _speed_spread(_: Results, row: Row) -> Interval:
    value, spread = row.samples_per_second, row.samples_per_second_spread
    assert value is not None
    assert spread is not None
    if len(row.repetitions) > 1:
        return spread
    return value * (1 - ONCE / 2), value * (1 + ONCE / 2)


def _memory(_: Results, row: Row) -> float | None:
    return row.peak_memory_bytes


def _memory_spread(_: Results, row: Row) -> Interval:
    peaks = [
        max(each.peak_memory_bytes_by_rank) for each in row.repetitions if each.peak_memory_bytes_by_rank
    ]
    return _widened(min(peaks), max(peaks))


def _seconds_to_target(results: Results, row: Row) -> float | None:
    return None if results.target_loss is None else row.seconds_to(results.target_loss)


def _seconds_spread(results: Results, row: Row) -> Interval:
    """The steps that it takes are the same in all repetitions; their time is not."""
    seconds, step, spread = _seconds_to_target(results, row), row.median_step_seconds, row.spread
    assert seconds is not None
    assert step is not None
    assert spread is not None
    low, high = (seconds * each / step for each in spread)
    return (low, high) if len(row.repetitions) > 1 else (seconds * (1 - ONCE / 2), seconds * (1 + ONCE / 2))


def _loss_spread(_: Results, row: Row) -> Interval:
    ends = [each.losses[-row.window :] for each in row.repetitions if each.losses]
    means = [sum(losses) / len(losses) for losses in ends]
    return _widened(min(means), max(means))


def _widened(low: float, high: float) -> Interval:
    """An interval that meets those which differ by less than :data:`ALIKE`."""
    share = (ALIKE - 1) / 2
    return low - share * abs(low), high + share * abs(high)


SPEED = Quality(name="speed", value=lambda _, row: row.samples_per_second, spread=_speed_spread, larger=True)
QUALITIES = (
    SPEED,
    Quality(name="memory", value=_memory, spread=_memory_spread),
    Quality(name="time to loss", value=_seconds_to_target, spread=_seconds_spread),
    Quality(name="loss", value=lambda _, row: row.loss, spread=_loss_spread),
)
