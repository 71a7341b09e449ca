"""Results that others measured, as rows to draw.

The way of a value: table -> its rows by field -> one :class:`GivenRow` for each name and number of slots; rows of the
same name and slots are repetitions.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.report.given_tables import values_of
from determined_ds.report.repetition import PARTS
from determined_ds.report.results import FAILED, MEASURED, Results, Row

Values = dict[str, Any]  # field -> value


@dataclass(frozen=True, kw_only=True)
class GivenRow(Row):
    """A row of which others measured the numbers: what a :class:`Row` derives is given.

    Args:
        speeds: Samples per second of each repetition.
        peaks: Bytes, likewise.
        states: Bytes, likewise.
        end_losses: The last loss of each, likewise.
        accuracies: Likewise, as they were given: shares or percents.
        curve: (seconds, loss) of the first repetition that has its losses and its time.
        bubbles: Shares of a pipeline's time, likewise.
        ideal: The bubble of the schedule alone.
        shares: Of a step, by part.
    """

    speeds: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    end_losses: tuple[float, ...] = ()
    accuracies: tuple[float, ...] = ()
    curve: tuple[tuple[float, float], ...] = ()
    bubbles: tuple[float, ...] = ()
    ideal: float | None = None
    shares: dict[str, float] | None = None

    @property
    def is_measured(self) -> bool:
        numbers = (self.speeds, self.peaks, self.states, self.end_losses, self.accuracies, self.bubbles)
        return self.status == MEASURED and (any(numbers) or self.shares is not None)

    @property
    def samples_per_second(self) -> float | None:
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def samples_per_second_spread(self) -> tuple[float, float] | None:
        return (min(self.speeds), max(self.speeds)) if self.speeds else None

    @property
    def num_repetitions(self) -> int:
        return len(self.speeds)

    @property
    def peak_memory_bytes(self) -> int | None:
        return max(self.peaks, default=None)

    @property
    def model_state_bytes(self) -> int | None:
        return max(self.states, default=None)

    @property
    def loss(self) -> float | None:
        return statistics.fmean(self.end_losses) if self.end_losses else None

    @property
    def loss_curve(self) -> tuple[tuple[float, float], ...]:
        return self.curve

    @property
    def accuracy(self) -> float | None:
        return statistics.fmean(self.accuracies) if self.accuracies else None

    @property
    def parts(self) -> dict[str, float] | None:
        return self.shares

    @property
    def bubble(self) -> float | None:
        return statistics.median(self.bubbles) if self.bubbles else None

    @property
    def bubble_ideal(self) -> float | None:
        return self.ideal


def results_of_table(table: object) -> Results:
    """A table of numbers as results to draw.

    Args:
        table: A list of mappings or a DataFrame; its names are those of :data:`given_tables.NAMES`.

    Raises:
        ConfigError: it is another kind of table; every reason at once.
    """
    groups: dict[tuple[str, int], list[Values]] = {}
    for values in values_of(table):
        groups.setdefault((values["name"], values.get("slots", 1)), []).append(values)
    rows = tuple(_row(name, slots, group) for (name, slots), group in groups.items())
    return Results(title="", command="", created="", machine="", accelerator="cuda", steps=0, rows=rows)


def _row(name: str, slots: int, group: Sequence[Values]) -> GivenRow:
    of = {field: tuple(each[field] for each in group if field in each) for field in _fields(group)}
    row = _measured(name, slots, group, of)
    failed = next(
        (each for each in group if each.get("status", MEASURED) != MEASURED or "reason" in each), None
    )
    if failed is None and row.is_measured:
        return row
    why = {"status": FAILED, "reason": "the table has no numbers of it"} if failed is None else failed
    status = why.get("status", FAILED)
    return replace(row, status=FAILED if status == MEASURED else status, reason=why.get("reason", ""))


def _measured(name: str, slots: int, group: Sequence[Values], of: dict[str, tuple[Any, ...]]) -> GivenRow:
    return GivenRow(
        name=name,
        slots=slots,
        status=MEASURED,
        pipe_parallel_size=2 if "bubble" in of else None,
        estimated_model_state_bytes=max(of.get("estimated_model_state_bytes", ()), default=None),
        speeds=tuple(speed for each in group if (speed := _speed(each)) is not None),
        peaks=of.get("peak_memory_bytes", ()),
        states=of.get("model_state_bytes", ()),
        end_losses=tuple(loss for each in group if (loss := _end_loss(each)) is not None),
        accuracies=of.get("accuracy", ()),
        curve=next((curve for each in group if (curve := _curve(each))), ()),
        bubbles=of.get("bubble", ()),
        shares=_shares(of),
        ideal=next(iter(of.get("bubble_ideal", ())), None),
    )


def _shares(of: dict[str, tuple[Any, ...]]) -> dict[str, float] | None:
    means = {part: statistics.fmean(of.get(f"{part}_share") or (0.0,)) for part in PARTS}
    return {part: share for part, share in means.items() if share} or None


def _fields(group: Sequence[Values]) -> list[str]:
    return list(dict.fromkeys(field for each in group for field in each))


def _speed(values: Values) -> float | None:
    if "samples_per_second" in values:
        return float(values["samples_per_second"])
    if "step_seconds" in values and "samples_per_step" in values:
        return float(values["samples_per_step"] / values["step_seconds"])
    return None


def _end_loss(values: Values) -> float | None:
    if "loss" in values:
        return float(values["loss"])
    return float(values["losses"][-1]) if values.get("losses") else None


def _curve(values: Values) -> tuple[tuple[float, float], ...]:
    """The losses, evenly spaced over the time of the whole training; without that, a step apart."""
    losses = values.get("losses", ())
    if "total_seconds" in values and losses:
        each = values["total_seconds"] / len(losses)
    elif "step_seconds" in values:
        each = values["step_seconds"]
    else:
        return ()
    return tuple(((index + 1) * each, loss) for index, loss in enumerate(losses))
