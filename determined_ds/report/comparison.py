"""The report of a comparison: results.json, results.csv and report.html."""

from __future__ import annotations

import contextlib
import math
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.documents.files import write_files
from determined_ds.report.columns import COLUMNS, Column, rows_csv
from determined_ds.report.numbers import UNKNOWN, loss_text, printable, shortened
from determined_ds.report.results import WINDOW, Results, Row, results_text
from determined_ds.report.verdict import (
    label,
    layout,
    memory_note,
    name_of,
    reason,
    unmeasured,
    verdict,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pair = tuple[Column, Column | None]  # what stands below it
RESULTS, CSV, PAGE = "results.json", "results.csv", "report.html"
LONGEST_REASON = 160  # in the table; the whole reason stands below it
# Columns of the page's table, each with what stands below its values.
CELLS = {
    "step_median_s": "spread",
    "step_p95_s": "",
    "samples_per_s": "samples_per_s_against_first",
    "tokens_per_s": "",
    "scaling_efficiency": "",
    "peak_memory_bytes": "peak_memory_against_first",
    "model_state_bytes": "estimated_model_state_bytes",
    "bubble": "bubble_ideal",
    "loss": "loss_against_first",
    "seconds_to_target_loss": "",
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


def _drawn(results: Results) -> list[tuple[str, Figure, str]]:
    """The pictures that make sense for results: a name, a figure, what to see in it."""
    from determined_ds.report.charts import CHARTS
    from determined_ds.report.gantt import CAPTION, schedules

    charts = {**CHARTS, "schedules": (schedules, CAPTION)}
    drawn = ((name, draw(results), caption) for name, (draw, caption) in charts.items())
    return [(name, figure, caption) for name, figure, caption in drawn if figure is not None]


def _page(results: Results) -> str:
    """Verdict, what was run, the table, pictures, what failed and why, how it was measured.

    The file loads nothing, and what came from outside is text in it, never markup. The same results give the same
    text.
    """
    from determined_ds.report.page import self_contained
    from determined_ds.report.style import PALETTE, address_of, strategy_colours

    pairs: list[Pair] = [
        (COLUMNS[name], COLUMNS.get(below))
        for name, below in CELLS.items()
        if COLUMNS[name].is_known(results)
    ]
    best = []
    for column, _ in pairs:
        values = {value for row in results.measured if (value := column.value(results, row)) is not None}
        best.append(column.best(values) if column.best and len(values) > 1 else None)
    colours = strategy_colours(results)
    rows = []
    for row in results.rows:
        status, _, why = reason(row).partition(": ")
        cells = [_cell((COLUMNS["slots"], None), results, row, None)]
        if row.is_measured:
            cells += [_cell(pair, results, row, most) for pair, most in zip(pairs, best, strict=True)]
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
            "small": below.head if below else "",
            "align": column.align,
        }
        for column, below in ((COLUMNS["name"], None), (COLUMNS["slots"], None), *pairs)
    ]
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
            for name, figure, caption in _drawn(results)
        ],
        unmeasured=[(label(row, results), reason(row)) for row in unmeasured(results)],
        memory_note=f"{note[0].upper()}{note[1:]}",
        window=WINDOW,
        target="" if results.target_loss is None else loss_text(results.target_loss),
    )


def _facts(results: Results) -> dict[str, str]:
    date, measured = results.created, ""
    with contextlib.suppress(ValueError):
        at = datetime.fromisoformat(results.created)
        date = f"{at.day} {at:%B %Y, %H:%M}{f' {at.tzname()}' if at.tzinfo else ''}"
    if repetitions := [each for row in results.measured for each in row.repetitions]:
        each = (
            [len(row.repetitions) for row in results.measured],
            [len(repetition.step_seconds) for repetition in repetitions],
            [repetition.warmup for repetition in repetitions],
        )
        times, steps, warmup = (" to ".join(map(str, sorted({min(of), max(of)}))) for of in each)
        measured = f"{times} x {steps} steps each, after {warmup} of warm-up, in fresh processes"
    sizes = sorted({(row.samples_per_step, row.tokens_per_sample) for row in results.measured}, key=str)
    batch = (f"{n:,} samples" + (f" of {tokens:,} tokens" if tokens else "") for n, tokens in sizes if n)
    return {
        "command": printable(results.command),
        "machine": printable(results.machine),
        "date": printable(date),
        "measured": measured,
        "global batch": "; ".join(batch),
    }


def _cell(pair: Pair, results: Results, row: Row, best: float | None) -> dict[str, Any]:
    column, below = pair
    value, small = column.value(results, row), below.shown(results, row) if below else UNKNOWN
    return {
        "text": column.shown(results, row),
        "small": "" if small == UNKNOWN else small,
        "value": repr(value) if value is not None and math.isfinite(value) else None,
        "class": "best" if value is not None and value == best else "",
    }
