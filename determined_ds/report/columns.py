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
    best_for,
    label,
    layout,
    memory_note,
    micro_batches,
    name_of,
    reason,
    unmeasured,
    without_winner,
)

AGAINST_FIRST = "against the first measured row"
LEAST_SHARE = 0.005  # of a step that a part of it is shown from


@dataclass(frozen=True, kw_only=True)
class Column:
    """One fact about a row.

    Args:
        value: The exact value, as the CSV has it and the page sorts by it; None where it is not known.
        head: Heading in the table and on the page; "" for a column of the CSV alone.
        unit: Name and size of the unit that values are shown in, one for all rows; "" leaves it out of the heading.
        text: Formats a value that is already divided by the unit.
        tip: The tooltip on the page.
        best: Which value the page highlights, if any.
        align: Of its cells.
    """

    value: Callable[[Results, Row], Any]
    head: str = ""
    unit: Callable[[Results], tuple[str, float]] | None = None
    text: Callable[[Any], str] = number
    tip: str = ""
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


def _peak_unit(results: Results) -> tuple[str, float]:
    return byte_unit(row.peak_memory_bytes for row in results.rows)


def _states_unit(results: Results) -> tuple[str, float]:
    sizes = [(row.model_state_bytes, row.estimated_model_state_bytes) for row in results.rows]
    return byte_unit(size for both in sizes for size in both)


def _of(name: str) -> Callable[[Results, Row], Any]:
    return lambda _, row: getattr(row, name)


def _against_first(name: str) -> Callable[[Results, Row], float | None]:
    return lambda results, row: (results.against_first(row) or {}).get(name)


def _seconds_to_target(results: Results, row: Row) -> float | None:
    return None if results.target_loss is None else row.seconds_to(results.target_loss)


def _share_of(part: str) -> Column:
    def share(_: Results, row: Row) -> float | None:
        return None if row.parts is None else row.parts.get(part, 0.0)

    return Column(value=share, head=part, text=lambda value: percent(value, 0))


# The CSV has these in this order. Programs read it by name: add at the end, and rename nothing.
CSV = {
    "name": Column(value=lambda _, row: printable(row.name), head="strategy", text=str, align="left"),
    "slots": Column(value=_of("slots"), head="slots", text=str, tip="Ranks: one process for each device"),
    "status": Column(value=_of("status")),
    "reason": Column(value=lambda _, row: printable(row.reason)),
    "zero_stage": Column(value=_of("zero_stage")),
    "replicas": Column(value=_of("replicas")),
    "pipe_parallel_size": Column(value=_of("pipe_parallel_size")),
    "micro_batch_size": Column(value=_of("micro_batch_size")),
    "accumulation": Column(value=_of("accumulation")),
    "precision": Column(value=_of("precision")),
    "samples_per_step": Column(value=_of("samples_per_step")),
    "tokens_per_sample": Column(value=_of("tokens_per_sample")),
    "num_repetitions": Column(value=_of("num_repetitions")),
    "num_timed_steps": Column(value=_of("num_steps")),
    "start_s": Column(value=_of("start_seconds")),
    "step_median_s": Column(
        value=_of("median_step_seconds"),
        head="step",
        unit=step_unit,
        tip="Median time of an optimizer step, over all timed steps of all repetitions",
    ),
    "step_p95_s": Column(
        value=_of("p95_step_seconds"), head="p95", unit=step_unit, tip="One step in twenty takes longer"
    ),
    "step_lowest_repetition_s": Column(value=lambda _, row: row.spread and row.spread[0]),
    "step_highest_repetition_s": Column(value=lambda _, row: row.spread and row.spread[1]),
    "samples_per_s": Column(
        value=_of("samples_per_second"),
        head="samples/s",
        tip="Global batch divided by the median step time",
        best=max,
    ),
    "tokens_per_s": Column(
        value=_of("tokens_per_second"), head="tokens/s", tip="Samples per second times tokens per sample"
    ),
    "samples_per_s_against_first": Column(
        value=_against_first("samples_per_second"), head="vs. first", text=ratio, tip=f"Ratio {AGAINST_FIRST}"
    ),
    "scaling_efficiency": Column(
        value=lambda results, row: results.scaling_efficiency(row),
        head="scaling",
        text=percent,
        tip="Throughput as a share of ideal scaling from the fewest slots of the same strategy",
    ),
    "peak_memory_bytes": Column(
        value=_of("peak_memory_bytes"),
        head="peak",
        unit=_peak_unit,
        tip="Peak memory of the rank, and of the repetition, that took most",
        best=min,
    ),
    "peak_memory_against_first": Column(
        value=_against_first("peak_memory_bytes"), head="vs. first", text=ratio, tip=f"Ratio {AGAINST_FIRST}"
    ),
    "model_state_bytes": Column(
        value=_of("model_state_bytes"),
        head="states",
        unit=_states_unit,
        tip="Parameters, gradients and optimizer states found in the engine",
    ),
    "estimated_model_state_bytes": Column(
        value=_of("estimated_model_state_bytes"),
        head="estimate",
        unit=_states_unit,
        tip="Model states that the memory model expects",
    ),
    "bubble": Column(
        value=_of("bubble"),
        head="bubble",
        text=percent,
        tip="Share of time in which the stages of a pipeline wait",
    ),
    "bubble_ideal": Column(
        value=_of("bubble_ideal"), head="ideal", text=percent, tip="Bubble of the schedule alone"
    ),
    "loss": Column(value=_of("loss"), head="loss", text=loss_text, tip="Mean loss of the last five steps"),
    "loss_against_first": Column(
        value=_against_first("loss"), head="vs. first", text=difference, tip=f"Difference {AGAINST_FIRST}"
    ),
    "seconds_to_target_loss": Column(
        value=_seconds_to_target,
        head="time",
        unit=lambda results: (f"s to {number(results.target_loss)}", 1),
        text=lambda value: number(value, 3),
        tip="Training time to the highest final loss of any row, which every row reaches",
        best=min,
    ),
    "target_loss": Column(value=lambda results, _: results.target_loss),
    "best_for": Column(
        value=lambda results, row: ", ".join(best_for(results, row)) or None,
        head="best for",
        text=str,
        tip="What no other row is better for; tied: another cannot be distinguished from it",
        align="left",
    ),
    **{f"{part}_share": _share_of(part) for part in PARTS},
}
COLUMNS = {
    **CSV,
    "spread": Column(
        value=lambda _, row: row.spread if len(row.repetitions) > 1 else None,
        head="spread",
        unit=lambda results: ("", step_unit(results)[1]),  # that of the step beside it
        text=lambda ends: span(*ends),
        tip="Lowest and highest median of the repetitions",
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
    notes = [f"{label(row, results)}: {reason(row)}" for row in unmeasured(results)]
    tables = []
    if results.measured:
        tables.append(_table(results, results.measured, shown, [*notes, *_footnotes(results)]))
    elif notes:
        tables.append(Table(heads=[], rows=[], notes=notes))
    apart = [row for row in results.measured if row.parts]
    if apart:
        parts = {
            f"{part}_share": 0
            for part in PARTS
            if any((row.parts or {}).get(part, 0) >= LEAST_SHARE for row in apart)
        }
        about = "shares of a step: a few more steps, taken apart by torch's profiler"
        tables.append(_table(results, apart, {"name": 0, "slots": 1, **parts}, [about]))
    return tables


def _table(results: Results, rows: Iterable[Row], shown: dict[str, int], notes: list[str]) -> Table:
    heads = [
        Head(
            text=COLUMNS[name].heading(results),
            align=COLUMNS[name].align,
            drop=drop,
            folds=name == "name",
        )
        for name, drop in shown.items()
    ]
    cells = []
    for row in rows:
        texts = {name: COLUMNS[name].shown(results, row) for name in shown}
        texts["name"] = name_of(row, results)
        cells.append(list(texts.values()))
    return Table(heads=heads, rows=cells, notes=notes)


def _footnotes(results: Results) -> Iterable[str]:
    first = results.first
    assert first is not None
    yield "step: median of all; spread: lowest and highest median of the repetitions"
    if len(results.measured) > 1:
        yield f"vs. first: against {label(first, results)}"
    for row in results.measured:
        if best := best_for(results, row):
            yield f"best for {', '.join(best)}: {label(row, results)}"
    if alike := without_winner(results):
        yield f"no row is best for {', '.join(alike)}: they differ by no more than repetitions do"
    if any(row.bubble is not None for row in results.measured):
        yield "bubble: share of time in which a pipeline's stages wait; ideal: by the schedule alone"
    if any(row.peak_memory_bytes is not None for row in results.measured):
        yield f"peak: of the rank that takes most; {memory_note(results)}"
