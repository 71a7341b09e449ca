"""Results as one HTML file that loads nothing else and can be read without its script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from markupsafe import Markup

from determined_ds.report.captions import caption
from determined_ds.report.columns import COLUMNS, UNKNOWN, Column
from determined_ds.report.formatting import (
    label,
    loss_text,
    memory_note,
    name_of,
    reason,
    unmeasured,
    verdict,
)
from determined_ds.report.pictures import PICTURES
from determined_ds.report.results import WINDOW, Results, Row
from determined_ds.report.self_contained import self_contained
from determined_ds.report.strengths import without_winner
from determined_ds.report.style import colours, palette_index, svg_of
from determined_ds.report.texts import printable, shortened

LONGEST_NAME = 120
LONGEST_REASON = 160  # the whole reason stands below the table
# Columns of the table, each with what stands below its values.
CELLS = (
    ("step_median_s", "spread"),
    ("step_p95_s", ""),
    ("samples_per_s", "samples_per_s_against_first"),
    ("tokens_per_s", ""),
    ("scaling_efficiency", ""),
    ("peak_memory_bytes", "peak_memory_against_first"),
    ("model_state_bytes", "estimated_model_state_bytes"),
    ("bubble", "bubble_ideal"),
    ("loss", "loss_against_first"),
    ("seconds_to_target_loss", ""),
)
BEST_FOR = "best_for"
Pair = tuple[Column, Column | None]


def report_page(results: Results) -> str:
    """The report: verdict, what was run, the table, pictures, what failed and why, how it was measured.

    The file loads nothing, and what came from outside is text in it, never markup. The same results give the same
    text.

    Args:
        results: What was measured, or could not be.
    """
    pairs = [(COLUMNS[name], COLUMNS.get(below)) for name, below in CELLS]
    pairs = [pair for pair in pairs if pair[0].is_known(results)]
    slots: Pair = (COLUMNS["slots"], None)
    if COLUMNS[BEST_FOR].is_known(results):
        pairs.insert(0, (COLUMNS[BEST_FOR], None))
    best = [_best(column, results) for column, _ in pairs]
    heads = [(COLUMNS["name"], None), slots, *pairs]
    note = memory_note(results)
    return self_contained(
        "page.html.jinja",
        ["page.js"],
        title=printable(results.title),
        verdict=verdict(results),
        facts=_facts(results),
        results=results,
        repeated=any(len(row.repetitions) > 1 for row in results.measured),
        first=label(results.first, results) if results.first else "",
        alike=", ".join(without_winner(results)),
        heads=[_head(pair, results) for pair in heads],
        rows=[_row(row, results, pairs, best) for row in results.rows],
        pictures=list(_pictures(results)),
        unmeasured=[(label(row, results), reason(row)) for row in unmeasured(results)],
        memory_note=f"{note[0].upper()}{note[1:]}",
        window=WINDOW,
        target="" if results.target_loss is None else loss_text(results.target_loss),
    )


def _facts(results: Results) -> dict[str, str]:
    return {
        "command": printable(results.command),
        "machine": printable(results.machine),
        "date": _date(results.created),
        "measured": _amount(results),
        "global batch": _batches(results),
    }


def _date(created: str) -> str:
    try:
        at = datetime.fromisoformat(created)
    except ValueError:
        return printable(created)
    zone = f" {at.tzname()}" if at.tzinfo else ""
    return f"{at.day} {at:%B %Y, %H:%M}{zone}"


def _amount(results: Results) -> str:
    repetitions = [each for row in results.measured for each in row.repetitions]
    if not repetitions:
        return ""
    times = _range(len(row.repetitions) for row in results.measured)
    steps = _range(len(each.step_seconds) for each in repetitions)
    warmup = _range(each.warmup for each in repetitions)
    return f"{times} x {steps} steps each, after {warmup} of warm-up, in fresh processes"


def _range(values: Iterable[int]) -> str:
    known = sorted(set(values))
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _batches(results: Results) -> str:
    sizes = {(row.samples_per_step, row.tokens_per_sample) for row in results.measured}
    return "; ".join(
        f"{samples:,} samples" + (f" of {tokens:,} tokens" if tokens else "")
        for samples, tokens in sorted(sizes, key=str)
        if samples is not None
    )


# ------------------------------------------------------------------------------------------------ the table


def _head(pair: Pair, results: Results) -> dict[str, str]:
    column, below = pair
    tip = "; below: ".join(each.tip for each in pair if each and each.tip)
    small = below.head if below else ""
    return {"text": column.heading(results), "small": small, "tip": tip, "align": column.align}


def _best(column: Column, results: Results) -> float | None:
    values = [value for row in results.measured if (value := column.value(results, row)) is not None]
    return column.best(values) if column.best and len(set(values)) > 1 else None


def _row(row: Row, results: Results, pairs: list[Pair], best: list[float | None]) -> dict[str, Any]:
    name = name_of(row, results, LONGEST_NAME)
    status, _, why = reason(row).partition(": ")
    below = COLUMNS["layout"].shown(results, row)
    cells = [_cell((COLUMNS["slots"], None), results, row, None)]
    if row.is_measured:
        cells += [_cell(pair, results, row, most) for pair, most in zip(pairs, best, strict=True)]
    return {
        "colour": palette_index(colours(results)[row.name]),
        "name": {"text": name, "small": "" if below == UNKNOWN else below},
        "cells": cells,
        "status": status,
        "why": shortened(why, LONGEST_REASON),
    }


def _cell(pair: Pair, results: Results, row: Row, best: float | None) -> dict[str, Any]:
    column, below = pair
    value = column.value(results, row)
    small = below.shown(results, row) if below else UNKNOWN
    is_text = column.align == "left"
    return {
        "text": column.shown(results, row) if value is not None or not is_text else "",
        "small": "" if small == UNKNOWN else small,
        "value": value if is_text else repr(value) if value is not None and math.isfinite(value) else None,
        "class": "words" if is_text else "best" if value is not None and value == best else "",
    }


def _pictures(results: Results) -> Iterator[dict[str, Any]]:
    for picture in PICTURES:
        figure = picture.draw(results)
        if figure is not None:
            svg = svg_of(figure, picture.name).replace("<svg ", f'<svg aria-label="{picture.title}" ', 1)
            yield {
                "name": picture.name,
                "svg": Markup(svg),
                "caption": caption(picture.name, results),
                "is_wide": picture.is_wide,
            }
