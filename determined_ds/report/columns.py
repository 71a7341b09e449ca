"""The columns of results, each defined once: the terminal table, the CSV and the page read them from here."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from determined_ds.report.numbers import (
    UNKNOWN,
    byte_unit,
    difference,
    loss_text,
    number,
    percent,
    printable,
    ratio,
    span,
)
from determined_ds.report.results import PARTS, Results, Row
from determined_ds.report.table import Head, Table
from determined_ds.report.verdict import (
    label,
    layout,
    memory_note,
    micro_batches,
    reason,
    unmeasured,
)

LEAST_SHARE = 0.005  # of a step that a part of it is shown from


@dataclass(frozen=True, kw_only=True)
class Column:
    """One fact about a row.

    Args:
        value: The exact value, as the CSV has it and the page sorts by it; None where it is not known.
        head: Heading in the table and on the page; "" for a column of the CSV alone.
        unit: Name and size of the unit that values are shown in, one for all rows; "" leaves it out of the heading.
        text: Formats a value that is already divided by the unit.
        best: Which value the page highlights, if any.
        align: Of its cells.
    """

    value: Callable[[Results, Row], Any]
    head: str = ""
    unit: Callable[[Results], tuple[str, float]] | None = None
    text: Callable[[Any], str] = number
    best: Callable[[Iterable[float]], float] | None = None
    align: Literal["left", "right"] = "right"

    def heading(self, results: Results) -> str:
        """Its heading with the unit: ``step, ms``."""
        name = self.unit(results)[0] if self.unit else ""
        return f"{self.head}, {name}" if name else self.head

    def shown(self, results: Results, row: Row) -> str:
        """A row's value in the unit of the column, formatted."""
        value = self.value(results, row)
        if value is None:
            return UNKNOWN
        if self.unit:
            size = self.unit(results)[1]
            value = tuple(each / size for each in value) if isinstance(value, tuple) else value / size
        return self.text(value)

    def is_known(self, results: Results) -> bool:
        """Whether any measured row has a value."""
        return any(self.value(results, row) is not None for row in results.measured)


def step_unit(results: Results) -> tuple[str, float]:
    """The unit of step times, and its seconds."""
    longest = max((row.median_step_seconds or 0 for row in results.rows), default=0)
    return ("s", 1.0) if longest >= 10 else ("ms", 1e-3)


def _of(name: str, head: str = "", **how: Any) -> Column:
    return Column(value=lambda _, row: getattr(row, name), head=head, **how)


def _against_first(name: str, text: Callable[[Any], str]) -> Column:
    return Column(
        value=lambda results, row: (results.against_first(row) or {}).get(name), head="vs. first", text=text
    )


def _share_of(part: str) -> Column:
    def share(_: Results, row: Row) -> float | None:
        return None if row.parts is None else row.parts.get(part, 0.0)

    return Column(value=share, head=part, text=lambda value: percent(value, 0))


_TIME: dict[str, Any] = {"unit": step_unit}
_PEAK: dict[str, Any] = {"unit": lambda results: byte_unit(row.peak_memory_bytes for row in results.rows)}
_STATES: dict[str, Any] = {
    "unit": lambda results: byte_unit(
        size for row in results.rows for size in (row.model_state_bytes, row.estimated_model_state_bytes)
    )
}
# The CSV has these in this order. Programs read it by name: add at the end, and rename nothing.
CSV = {
    "name": Column(value=lambda _, row: printable(row.name), head="strategy", text=str, align="left"),
    "slots": _of("slots", "slots", text=str),
    "status": _of("status"),
    "reason": Column(value=lambda _, row: printable(row.reason)),
    **{
        name: _of(name)
        for name in (
            *(
                "zero_stage",
                "replicas",
                "pipe_parallel_size",
                "micro_batch_size",
                "accumulation",
                "precision",
            ),
            *("samples_per_step", "tokens_per_sample", "num_repetitions"),
        )
    },
    "num_timed_steps": _of("num_steps"),
    "start_s": _of("start_seconds"),
    "step_median_s": _of("median_step_seconds", "step", **_TIME),
    "step_p95_s": _of("p95_step_seconds", "p95", **_TIME),
    "step_lowest_repetition_s": Column(value=lambda _, row: row.spread and row.spread[0]),
    "step_highest_repetition_s": Column(value=lambda _, row: row.spread and row.spread[1]),
    "samples_per_s": _of("samples_per_second", "samples/s", best=max),
    "tokens_per_s": _of("tokens_per_second", "tokens/s"),
    "samples_per_s_against_first": _against_first("samples_per_second", ratio),
    "scaling_efficiency": Column(
        value=lambda results, row: results.scaling_efficiency(row),
        head="scaling",
        text=percent,
    ),
    "peak_memory_bytes": _of("peak_memory_bytes", "peak", best=min, **_PEAK),
    "peak_memory_against_first": _against_first("peak_memory_bytes", ratio),
    "model_state_bytes": _of("model_state_bytes", "states", **_STATES),
    "estimated_model_state_bytes": _of("estimated_model_state_bytes", "estimate", **_STATES),
    "bubble": _of("bubble", "bubble", text=percent),
    "bubble_ideal": _of("bubble_ideal", "ideal", text=percent),
    "loss": _of("loss", "loss", text=loss_text),
    "loss_against_first": _against_first("loss", difference),
    "seconds_to_target_loss": Column(
        value=lambda results, row: row.seconds_to(results.target_loss),
        head="time",
        unit=lambda results: (f"s to {number(results.target_loss)}", 1),
        text=lambda value: number(value, 3),
        best=min,
    ),
    "target_loss": Column(value=lambda results, _: results.target_loss),
    **{f"{part}_share": _share_of(part) for part in PARTS},
}
COLUMNS = {
    **CSV,
    "spread": Column(
        value=lambda _, row: row.spread if len(row.repetitions) > 1 else None,
        head="spread",
        unit=lambda results: ("", step_unit(results)[1]),  # that of the step beside it
        text=lambda ends: span(*ends),
    ),
    "layout": Column(
        value=lambda results, row: layout(row, results) or None, head="layout", text=str, align="left"
    ),
    "micro": Column(value=lambda _, row: micro_batches(row), head="micro", text=str),
}
# Of the terminal's table -> which of them goes first where there is no room; 0: it stays.
IN_TERMINAL = {
    "name": 0,
    "slots": 6,
    "micro": 8,
    "step_median_s": 0,
    "spread": 1,
    "step_p95_s": 11,
    "samples_per_s": 0,
    "samples_per_s_against_first": 2,
    "tokens_per_s": 10,
    "peak_memory_bytes": 3,
    "model_state_bytes": 9,
    "estimated_model_state_bytes": 9,
    "bubble": 5,
    "bubble_ideal": 7,
    "loss": 4,
}


def rows_csv(results: Results) -> str:
    """The rows as CSV by RFC 4180: a header with units in its names, then a line a row; nothing is rounded.

    Unknown values are empty. The columns are the same, in the same order, for all results.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(CSV)
    writer.writerows([column.value(results, row) for column in CSV.values()] for row in results.rows)
    return text.getvalue()


def results_tables(results: Results) -> list[Table]:
    """The tables for a terminal, a line a row: the measurements, and where they were taken, steps taken apart.

    Below the measurements stand the rows that have none, and why.
    """
    shown = {name: drop for name, drop in IN_TERMINAL.items() if COLUMNS[name].is_known(results)}
    if len({row.slots for row in results.rows}) > 1:
        shown["slots"] = 0

    def table(rows: Iterable[Row], shown: dict[str, int], notes: list[str]) -> Table:
        columns = [(name, COLUMNS[name], drop) for name, drop in shown.items()]
        heads = [
            Head(text=column.heading(results), align=column.align, drop=drop, folds=name == "name")
            for name, column, drop in columns
        ]
        return Table(
            heads=heads,
            rows=[[column.shown(results, row) for _, column, _ in columns] for row in rows],
            notes=notes,
        )

    notes = [f"{label(row, results)}: {reason(row)}" for row in unmeasured(results)]
    if results.first is None:
        return [Table(heads=[], rows=[], notes=notes)] if notes else []
    notes.append("step: median of all; spread: lowest and highest median of the repetitions")
    if len(results.measured) > 1:
        notes.append(f"vs. first: against {label(results.first, results)}")
    if any(row.bubble is not None for row in results.measured):
        notes.append("bubble: share of time in which a pipeline's stages wait; ideal: by the schedule alone")
    if any(row.peak_memory_bytes is not None for row in results.measured):
        notes.append(f"peak: of the rank that takes most; {memory_note(results)}")
    tables = [table(results.measured, shown, notes)]
    if apart := [row for row in results.measured if row.parts]:
        most = {part: max((row.parts or {}).get(part, 0) for row in apart) for part in PARTS}
        parts = {f"{part}_share": 0 for part in PARTS if most[part] >= LEAST_SHARE}
        about = "shares of a step: a few more steps, taken apart by torch's profiler"
        tables.append(table(apart, {"name": 0, "slots": 1, **parts}, [about]))
    return tables
