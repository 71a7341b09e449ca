"""The report of a comparison: results.json, results.csv and report.html."""

from __future__ import annotations

import contextlib
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from determined_ds.documents.files import write_files
from determined_ds.report.columns import (
    COLUMNS,
    Column,
    label,
    layout,
    memory_note,
    name_of,
    reason,
    rows_csv,
    unmeasured,
)
from determined_ds.report.numbers import (
    UNKNOWN,
    byte_unit,
    date_text,
    loss_text,
    number,
    printable,
    shortened,
)
from determined_ds.report.results import (
    CANNOT_RUN,
    FAILED,
    OUT_OF_MEMORY,
    STOPPED,
    WINDOW,
    Results,
    Row,
    results_text,
)

RESULTS, CSV, PAGE = "results.json", "results.csv", "report.html"
LONGEST_REASON = 160  # in the table; the whole reason stands below it
ONCE = 0.05  # assumed spread of a speed that was measured once, relative
ALIKE = 0.01  # sizes that differ by less are the same, relative
RAN_OUT = {
    OUT_OF_MEMORY: "ran out of memory",
    FAILED: "failed",
    CANNOT_RUN: "cannot run",
    STOPPED: "was stopped",
}


def write_report(results: Results, folder: str | Path, *, page: bool = True) -> list[Path]:
    """Write results as JSON, as CSV and as a page; all of them or none, each of them whole at any moment.

    Args:
        results: What was measured so far.
        folder: Made where it is missing. Files of an earlier report in it are replaced.
        page: Whether to draw the page, too; pictures take a second or two, which results that are not the last
            can do without.

    Returns:
        What was written.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    folder = Path(folder)
    texts = {folder / RESULTS: results_text(results), folder / CSV: rows_csv(results)}
    if page:
        texts[folder / PAGE] = _page(results)
    write_files(texts, overwrite=True)
    return list(texts)


def verdict(results: Results) -> str:
    """What came out, in one sentence."""

    def speed(row: Row) -> float:
        return row.samples_per_second or 0.0

    def ends(row: Row) -> tuple[float, float]:
        low, high = row.samples_per_second_spread or (0.0, 0.0)
        wider = 0 if len(row.repetitions) > 1 else ONCE / 2
        return low * (1 - wider), high * (1 + wider)

    # Those that none is faster than by more than repetitions differ, the fastest first.
    known = sorted(filter(speed, results.measured), key=speed, reverse=True)
    leading = [row for row in known if ends(row)[1] >= ends(known[0])[0]]
    if not leading:
        num = len(results.rows)
        return f"None of the {num} was measured." if num > 1 else "Nothing was measured."
    fastest, first = leading[0], results.first
    does = "does" if len(known) == 1 else "is the fastest:"
    parts = [f"{label(fastest, results)} {does} {number(speed(fastest), 3)} samples/s"]
    # Beside the first strategy on as many slots; beside the first row, where it is that itself.
    alike = [row for row in known if first and (row.name, row.slots) == (first.name, fastest.slots)]
    others = [row for row in (*alike, first) if row is not None and row in known and row != fastest]
    if others and others[0] not in leading:  # a ratio within the spread says nothing
        named = label(others[0], results) if others[0].slots != fastest.slots else name_of(others[0])
        parts[0] += f", {speed(fastest) / speed(others[0]):.2f} times {named}"
    if close := [label(row, results) for row in leading[1:]]:
        named = " and ".join(filter(None, (", ".join(close[:-1]), close[-1])))
        parts[0] += f" (too close to {named if len(close) <= 3 else f'{len(close)} others'} to distinguish)"
    sizes = {size: row for row in reversed(results.measured) if (size := row.peak_memory_bytes) is not None}
    if sizes and max(sizes) > (1 + ALIKE) * min(sizes):
        unit, size = byte_unit([min(sizes)])
        leanest = label(sizes[min(sizes)], results)
        parts.append(f"{leanest} takes the least memory, {number(min(sizes) / size, 3)} {unit} a rank")
    missing = unmeasured(results)
    if len(missing) == 1:
        parts.append(f"{label(missing[0], results)} {RAN_OUT.get(missing[0].status, 'timed no step')}")
    elif missing:
        parts.append(f"{len(missing)} of {len(results.rows)} were not measured")
    return "; ".join(parts) + "."


def _page(results: Results) -> str:
    """Verdict, what was run, the table, pictures, what failed and why, how it was measured.

    The file loads nothing, and what came from outside is text in it, never markup. The same results give the same
    text.
    """
    from determined_ds.report.charts import CHARTS
    from determined_ds.report.style import PALETTE, address_of, self_contained, strategy_colours

    columns = [each for each in COLUMNS.values() if each.below is not None and each.is_known(results)]
    best = []
    for column in columns:
        values = {value for row in results.measured if (value := column.value(results, row)) is not None}
        best.append(column.best(values) if column.best and len(values) > 1 else None)

    def cell(row: Row, column: Column, best: float | None = None) -> dict[str, Any]:
        value, small = column.value(results, row), ""
        if column.below and (shown := COLUMNS[column.below].shown(results, row)) != UNKNOWN:
            small = shown
        is_number = value is not None and math.isfinite(value)
        is_best = value is not None and value == best
        return {
            "text": column.shown(results, row),
            "small": small,
            "value": repr(value) if is_number else None,
            "class": "best" if is_best else "",
        }

    colours = strategy_colours(results)
    rows = []
    for row in results.rows:
        status, _, why = reason(row).partition(": ")
        cells = [cell(row, COLUMNS["slots"])]
        if row.is_measured:
            cells += [cell(row, column, most) for column, most in zip(columns, best, strict=True)]
        rows.append(
            {
                "colour": PALETTE.index(colours[row.name]),
                "name": name_of(row),
                "below": layout(row, results),
                "cells": cells,
                "status": status,
                "why": shortened(why, LONGEST_REASON),
            }
        )
    heads = [
        {
            "text": column.heading(results),
            "small": COLUMNS[column.below].head if column.below else "",
            "align": column.align,
        }
        for column in (COLUMNS["name"], COLUMNS["slots"], *columns)
    ]
    drawn = [(name, draw(results), caption) for name, (draw, caption) in CHARTS.items()]
    note = memory_note(results)
    return self_contained(
        "comparison.html.jinja",
        ["sort.js"],
        title=printable(results.title),
        verdict=verdict(results),
        facts=_facts(results),
        results=results,
        repeated=any(len(row.repetitions) > 1 for row in results.measured),
        first=label(results.first, results) if results.first else "",
        heads=heads,
        rows=rows,
        pictures=[
            {"name": name, "address": address_of(figure), "caption": caption, "is_wide": name == "schedules"}
            for name, figure, caption in drawn
            if figure is not None
        ],
        unmeasured=[(label(row, results), reason(row)) for row in unmeasured(results)],
        memory_note=f"{note[0].upper()}{note[1:]}",
        window=WINDOW,
        target="" if results.target_loss is None else loss_text(results.target_loss),
    )


def _facts(results: Results) -> dict[str, str]:
    date, measured = results.created, ""
    with contextlib.suppress(ValueError):
        date = date_text(datetime.fromisoformat(results.created))
    if starts := [each for row in results.measured for each in row.repetitions]:
        times = max(len(row.repetitions) for row in results.measured)
        measured = (
            f"{times} x {results.steps} steps each, after {starts[0].warmup} of warm-up, in fresh processes"
        )
    sizes = sorted({(row.samples_per_step, row.tokens_per_sample) for row in results.measured}, key=str)
    batch = (f"{n:,} samples" + (f" of {tokens:,} tokens" if tokens else "") for n, tokens in sizes if n)
    return {
        "command": printable(results.command),
        "machine": printable(results.machine),
        "date": printable(date),
        "measured": measured,
        "global batch": "; ".join(batch),
    }
