"""What came out of measurements, in words: names of rows, what each is best for, and the verdict of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from determined_ds.report.numbers import byte_unit, count, distinct_names, number, printable, shortened
from determined_ds.report.results import CANNOT_RUN, FAILED, OUT_OF_MEMORY, STOPPED, Results, Row

LONGEST_NAME = 40
LONGEST_REASON = 600
RAN_OUT = {
    OUT_OF_MEMORY: "ran out of memory",
    FAILED: "failed",
    CANNOT_RUN: "cannot run",
    STOPPED: "was stopped",
}
ONCE = 0.05  # assumed spread of a speed that was measured once, relative
ALIKE = 1.01  # sizes and losses that differ by less are the same
Interval = tuple[float, float]


def name_of(row: Row, results: Results, most: int = LONGEST_NAME) -> str:
    """A row's name, fit to be shown, and another than that of any row of another name."""
    return distinct_names((printable(each.name) for each in results.rows), most)[printable(row.name)]


def label(row: Row, results: Results, joint: str = " on ", most: int = LONGEST_NAME) -> str:
    """What a row is called among the others: ``zero1``, or ``zero1 on 2 slots`` where rows differ in their slots.

    Args:
        row: One of the results'.
        results: Of which it is one.
        joint: Between name and slots.
        most: Characters of the name.
    """
    differ = len({each.slots for each in results.rows}) > 1
    return name_of(row, results, most) + (f"{joint}{count(row.slots, 'slot')}" if differ else "")


def layout(row: Row, results: Results) -> str:
    """How the work is shared out: ``2 stages, micro 4 x 8``; the precision too, where rows differ in it."""
    parts = []
    if row.is_pipeline:
        stages = f"{row.pipe_parallel_size} stages"
        parts.append(f"{row.replicas} x {stages}" if (row.replicas or 1) > 1 else stages)
    elif row.replicas is not None:
        parts.append(count(row.replicas, "replica"))
    if row.precision is not None and len({each.precision for each in results.rows} - {None}) > 1:
        parts.append(row.precision)
    if micro := micro_batches(row):
        parts.append(f"micro {micro}")
    return ", ".join(parts)


def micro_batches(row: Row) -> str | None:
    """The micro-batch, and how many of them a rank takes a step: ``16 x 1``."""
    known = row.micro_batch_size is not None and row.accumulation is not None
    return f"{row.micro_batch_size} x {row.accumulation}" if known else None


def reason(row: Row) -> str:
    """Why a row has no part in comparisons; "" of one that has."""
    if row.is_measured:
        return ""
    if row.status not in RAN_OUT:
        return "no step was timed: all of them were the warm-up"
    said = shortened(printable(row.reason), LONGEST_REASON)
    return f"{row.status}: {said}" if said else row.status


def unmeasured(results: Results) -> tuple[Row, ...]:
    """The rows that have no part in comparisons."""
    return tuple(row for row in results.rows if not row.is_measured)


def memory_note(results: Results) -> str:
    """What peak memory is, which depends on the accelerator."""
    if results.accelerator == "cpu":
        return "peak memory on a CPU is a process's resident memory: torch itself, the data and the model are in it"
    return "peak memory is what the allocator had handed out of the device's memory at most"


# -------------------------------------------------------------------------------------- what each row is best for


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Something that a strategy may be best for.

    Args:
        name: As people read it.
        value: Of a row, None where it is not known.
        spread: Lowest and highest of a row's repetitions; of a row that has a value.
        larger: Whether the larger value is the better.
    """

    name: str
    value: Callable[[Results, Row], float | None]
    spread: Callable[[Results, Row], Interval]
    larger: bool = False

    def known(self, results: Results) -> list[Row]:
        """The measured rows with a finite value, the best one first."""
        found = [(self.value(results, row), row) for row in results.measured]
        finite = [(value, row) for value, row in found if value is not None and math.isfinite(value)]
        return [row for _, row in sorted(finite, key=lambda pair: pair[0], reverse=self.larger)]

    def is_tied(self, results: Results, row: Row, other: Row) -> bool:
        """Whether the spreads of two rows meet."""
        (low, high), (its_low, its_high) = self.spread(results, row), self.spread(results, other)
        return low <= its_high and its_low <= high


def best_for(results: Results, row: Row) -> tuple[str, ...]:
    """What a row is best for; ``speed (tied)`` where it shares that with some others.

    Nothing that all rows share: they do not differ in it.
    """
    found = []
    for quality in QUALITIES:
        known = quality.known(results)
        tied = [each for each in known if quality.is_tied(results, each, known[0])]
        if any(each is row for each in tied) and len(tied) < len(known):
            found.append(f"{quality.name} (tied)" if len(tied) > 1 else quality.name)
    return tuple(found)


def without_winner(results: Results) -> tuple[str, ...]:
    """Names of the qualities in which the measured rows do not differ by more than their spread."""
    known = [(quality, quality.known(results)) for quality in QUALITIES]
    return tuple(
        quality.name
        for quality, rows in known
        if len(rows) > 1 and all(quality.is_tied(results, row, rows[0]) for row in rows)
    )


def _around(low: float, high: float, share: float) -> Interval:
    """An interval wider by a share of its ends, half of it on each side."""
    return low - share / 2 * abs(low), high + share / 2 * abs(high)


def _speed_spread(_: Results, row: Row) -> Interval:
    low, high = row.samples_per_second_spread or (math.nan, math.nan)
    return _around(low, high, 0 if len(row.repetitions) > 1 else ONCE)


def _memory_spread(_: Results, row: Row) -> Interval:
    peaks = [max(r.peak_memory_bytes_by_rank) for r in row.repetitions if r.peak_memory_bytes_by_rank]
    return _around(min(peaks), max(peaks), ALIKE - 1)


def _seconds_to_target(results: Results, row: Row) -> float | None:
    return None if results.target_loss is None else row.seconds_to(results.target_loss)


def _seconds_spread(results: Results, row: Row) -> Interval:
    """The steps that it takes are the same in all repetitions; their time is not."""
    steps = (_seconds_to_target(results, row) or 0) / (row.median_step_seconds or 1)
    low, high = row.spread or (math.nan, math.nan)
    return _around(steps * low, steps * high, 0 if len(row.repetitions) > 1 else ONCE)


def _loss_spread(_: Results, row: Row) -> Interval:
    ends = [each.losses[-row.window :] for each in row.repetitions if each.losses]
    means = [sum(losses) / len(losses) for losses in ends]
    return _around(min(means), max(means), ALIKE - 1)


SPEED = Quality(name="speed", value=lambda _, row: row.samples_per_second, spread=_speed_spread, larger=True)
QUALITIES = (
    SPEED,
    Quality(name="memory", value=lambda _, row: row.peak_memory_bytes, spread=_memory_spread),
    Quality(name="time to loss", value=_seconds_to_target, spread=_seconds_spread),
    Quality(name="loss", value=lambda _, row: row.loss, spread=_loss_spread),
)

# -------------------------------------------------------------------------------------------- the verdict


def verdict(results: Results) -> str:
    """What came out, in one sentence."""
    timed = SPEED.known(results)
    if not timed:
        num = len(results.rows)
        return f"None of the {num} was measured." if num > 1 else "Nothing was measured."
    parts = [_about_speed(results, timed)]
    sizes = [(row.peak_memory_bytes, row) for row in results.measured if row.peak_memory_bytes is not None]
    least, row = min(sizes, key=lambda pair: pair[0], default=(0, None))
    if row is not None and max(size for size, _ in sizes) > ALIKE * least:
        unit, size = byte_unit([least])
        parts.append(f"{label(row, results)} takes the least memory, {number(least / size, 3)} {unit} a rank")
    missing = unmeasured(results)
    if len(missing) == 1:
        parts.append(f"{label(missing[0], results)} {RAN_OUT.get(missing[0].status, 'timed no step')}")
    elif missing:
        parts.append(f"{len(missing)} of {len(results.rows)} were not measured")
    return "; ".join(parts) + "."


def _about_speed(results: Results, timed: list[Row]) -> str:
    """The fastest beside the first strategy on as many slots; beside the first row, where it is that itself."""
    fastest, first = timed[0], results.first
    name, speed = label(fastest, results), f"{number(fastest.samples_per_second, 3)} samples/s"
    if len(timed) == 1:
        return f"{name} does {speed}"
    alike = [row for row in timed if first and (row.name, row.slots) == (first.name, fastest.slots)]
    others = [row for row in (*alike, first) if row is not None and row is not fastest]
    other = next((row for row in others if row.samples_per_second), None)
    beside = ""
    if other is not None and other.samples_per_second and fastest.samples_per_second:
        named = label(other, results) if other.slots != fastest.slots else name_of(other, results)
        beside = f", {fastest.samples_per_second / other.samples_per_second:.2f} times {named}"
    close = [label(row, results) for row in timed[1:] if SPEED.is_tied(results, row, fastest)]
    if close:
        named = " and ".join([", ".join(close[:-1]), close[-1]][len(close) == 1 :])
        beside += f" (too close to {named if len(close) <= 3 else f'{len(close)} others'} to distinguish)"
    return f"{name} is the fastest: {speed}{beside}"
