"""The page's table: two lines a cell, sorted by a click where scripts run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from determined_ds.report.measurements import Results, Row
from determined_ds.report.style import colours, palette_index
from determined_ds.report.words import (
    between,
    byte_unit,
    difference,
    label,
    layout,
    loss_text,
    name_of,
    number,
    percent,
    ratio,
    reason,
    shortened,
    step_unit,
)

LONGEST_NAME = 120
LONGEST_REASON = 160  # all of it is told below


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column.

    Args:
        head: Its name, with the unit.
        below: What the second lines are; "" where there are none.
        value: What it is sorted by; None where that is not known.
        text: The first line of a cell.
        small: The second line.
        best: Which of the values to point out, if any.
    """

    head: str
    below: str = ""
    value: Callable[[Row], float | None]
    text: Callable[[Row], str]
    small: Callable[[Row], str] = lambda row: ""
    best: Callable[[list[float]], float] | None = None


def measurements(results: Results) -> str:
    """The table of all rows as HTML, with what its numbers are held against below it."""
    every = [*_speed(results), *_memory(results), *_training(results)]
    columns = [each for each in every if any(each.value(row) is not None for row in results.measured)]
    heads = "".join(f"<th scope=col>{_two_lines(each.head, each.below)}</th>" for each in columns)
    best = {each.head: _best(each, results) for each in columns}
    rows = "\n".join(_row(row, results, columns, best) for row in results.rows)
    across = "" if columns else "<th scope=col></th>"
    notes = _notes(results)
    return f"""<section>
<h2>Measurements</h2>
<div class="wide card">
<table>
<thead><tr><th scope=col>strategy</th><th scope=col>slots</th>{heads}{across}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
<p class="note">{escape(" ".join(notes))}</p>
</section>"""


def _notes(results: Results) -> list[str]:
    notes = []
    if len(results.measured) > 1 and results.first is not None:
        notes.append(f"Ratios and differences are against {label(results.first, results)}.")
    if any(len(row.repetitions) > 1 for row in results.measured):
        notes.append("Below the times are those of the fastest and the slowest repetition.")
    return notes


def _in(unit: float, value: float | None) -> str:
    return number(None if value is None else value / unit)


def _speed(results: Results) -> list[_Column]:
    name, unit = step_unit(results)
    return [
        _Column(
            head=f"step, {name}",
            below="repetitions",
            value=lambda row: row.median_step_seconds,
            text=lambda row: _in(unit, row.median_step_seconds),
            small=lambda row: between(row.spread, unit) if len(row.repetitions) > 1 else "",
        ),
        _Column(
            head=f"p95, {name}",
            value=lambda row: row.p95_step_seconds,
            text=lambda row: _in(unit, row.p95_step_seconds),
        ),
        _Column(
            head="samples/s",
            below="against first",
            value=lambda row: row.samples_per_second,
            text=lambda row: number(row.samples_per_second),
            small=lambda row: ratio((results.against_first(row) or {}).get("samples_per_second")),
            best=max,
        ),
        _Column(
            head="tokens/s",
            value=lambda row: row.tokens_per_second,
            text=lambda row: number(row.tokens_per_second),
        ),
        _Column(
            head="scaling",
            value=results.scaling_efficiency,
            text=lambda row: percent(results.scaling_efficiency(row)),
        ),
    ]


def _memory(results: Results) -> list[_Column]:
    peak_name, peak = byte_unit(row.peak_memory_bytes for row in results.rows)
    name, unit = byte_unit(
        size for row in results.rows for size in (row.model_state_bytes, row.estimated_model_state_bytes)
    )
    return [
        _Column(
            head=f"peak, {peak_name}",
            below="against first",
            value=lambda row: row.peak_memory_bytes,
            text=lambda row: _in(peak, row.peak_memory_bytes),
            small=lambda row: ratio((results.against_first(row) or {}).get("peak_memory_bytes")),
            best=min,
        ),
        _Column(
            head=f"states, {name}",
            below="estimate",
            value=lambda row: row.model_state_bytes,
            text=lambda row: _in(unit, row.model_state_bytes),
            small=lambda row: _in(unit, row.estimated_model_state_bytes),
        ),
    ]


def _training(results: Results) -> list[_Column]:
    target = results.target_loss

    def seconds(row: Row) -> float | None:
        return None if target is None else row.seconds_to(target)

    return [
        _Column(
            head="bubble",
            below="ideal",
            value=lambda row: row.bubble,
            text=lambda row: percent(row.bubble),
            small=lambda row: percent(row.bubble_ideal) if row.bubble is not None else "",
        ),
        _Column(
            head="loss",
            below="against first",
            value=lambda row: row.loss,
            text=lambda row: loss_text(row.loss),
            small=lambda row: difference((results.against_first(row) or {}).get("loss")),
        ),
        _Column(
            head=f"s to {number(target)}",
            value=seconds,
            text=lambda row: number(seconds(row), 3),
            best=min,
        ),
    ]


def _best(column: _Column, results: Results) -> float | None:
    values = [value for row in results.measured if (value := column.value(row)) is not None]
    return column.best(values) if column.best and len(set(values)) > 1 else None


def _row(row: Row, results: Results, columns: list[_Column], best: dict[str, float | None]) -> str:
    name, colour = escape(name_of(row, LONGEST_NAME)), palette_index(colours(results)[row.name])
    dot = f'<span class="dot c{colour}"></span>'
    cells = [
        f'<th scope=row data-value="{name}">{dot}{name}<small>{escape(layout(row, results))}</small></th>',
        f'<td data-value="{row.slots}">{row.slots}</td>',
    ]
    if not row.is_measured:
        status, _, said = reason(row).partition(": ")
        why = f'<span class="status">{escape(status)}</span> {escape(shortened(said, LONGEST_REASON))}'
        cells.append(f'<td class="why" colspan="{max(1, len(columns))}"><div>{why}</div></td>')
        return f"<tr>{''.join(cells)}</tr>"
    for column in columns:
        value = column.value(row)
        marked = ' class="best"' if value is not None and value == best[column.head] else ""
        is_known = value is not None and math.isfinite(value)
        sorted_by = f' data-value="{value!r}"' if is_known else ""
        inside = _two_lines(column.text(row), column.small(row) if column.below else "")
        cells.append(f"<td{marked}{sorted_by}>{inside}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _two_lines(text: str, small: str) -> str:
    return escape(text) + (f"<small>{escape(small)}</small>" if small else "")
