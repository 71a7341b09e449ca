"""Results as a table for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Literal

from determined_ds.report.columns import COLUMNS, CSV, UNKNOWN, Column
from determined_ds.report.fitted import NAME, PLAIN, Fitted, FittedColumn, FittedRow
from determined_ds.report.formatting import (
    has_several_slots,
    label,
    memory_note,
    parts_in_words,
    percent,
    reason,
)
from determined_ds.report.results import Results, Row
from determined_ds.report.strengths import without_winner
from determined_ds.report.texts import shortened

LONGEST_REASON = 240
REASON_STYLE = "yellow"
CRLF = "\r\n"
BEST_FOR = ("{best_for}",)  # of few rows is it known
# Each column as its lines, made of the columns that they name, the first of a line gives the heading; and what becomes
# of it where there is no room, the one with the highest number being dropped first.
Lines = tuple[str, ...]
LINES: dict[Lines, tuple[Literal["keep", "drop", "below", "above"], int]] = {
    ("{name}", "{shares}"): ("above", 0),
    ("{slots}", "{micro}"): ("drop", 3),
    ("{step_median_s}", "{spread}"): ("keep", 0),
    ("{step_p95_s}",): ("drop", 4),
    ("{samples_per_s} {samples_per_s_against_first:>5}", "{tokens_per_s}"): ("keep", 0),
    (
        "{peak_memory_bytes} {peak_memory_against_first:>5}",
        "{model_state_bytes} ({estimated_model_state_bytes})",
    ): ("drop", 1),
    ("{loss}", "{loss_against_first}"): ("drop", 2),
    BEST_FOR: ("below", 0),
}


def results_table(results: Results) -> Fitted:
    """The table for a terminal, two lines for each row; it fits whatever width the console has.

    The reason why a row was not measured spans the columns; a pipeline has its bubble below. Ratios and differences
    are against the first measured row.

    Args:
        results: What was measured.
    """
    columns = {
        (first, *(line for line in rest if _leading(line).is_known(results))): no_room
        for (first, *rest), no_room in LINES.items()
    }
    heads = [
        FittedColumn(
            head=tuple(_leading(line).heading(results) for line in lines),
            align=_leading(lines[0]).align,
            no_room="keep" if lines[0] == "{slots}" and has_several_slots(results) else no_room,
            rank=rank,
            style=NAME if lines[0] == "{name}" else PLAIN,
        )
        for lines, (no_room, rank) in columns.items()
        if lines != BEST_FOR or _leading(lines[0]).is_known(results)
    ]
    rows = [_row(list(columns), results, row) for row in results.rows]
    return Fitted(columns=heads, rows=rows, notes=_footnotes(results))


def _leading(line: str) -> Column:
    found = re.match(r"{(\w+)", line)
    assert found is not None, line
    return COLUMNS[found[1]]


def _row(columns: Sequence[Lines], results: Results, row: Row) -> FittedRow:
    texts = {name: column.shown(results, row) for name, column in COLUMNS.items() if column.head}
    every = [(lines, [line.format_map(texts) for line in lines]) for lines in columns]
    cells = [
        tuple(
            "" if text == UNKNOWN and (index or lines == BEST_FOR) else text
            for index, text in enumerate(cell)
        )
        for lines, cell in every
    ]
    if not row.is_measured:
        return FittedRow(cells=cells[:2], rest=shortened(reason(row), LONGEST_REASON), style=REASON_STYLE)
    below = [parts_in_words(row)] if row.parts else []
    if row.bubble is not None:
        below += [
            f"bubble {percent(row.bubble)} of the time; {percent(row.bubble_ideal)} by the schedule alone"
        ]
    return FittedRow(cells=cells, below=below)


def _footnotes(results: Results) -> list[str]:
    first = results.first
    if first is None:
        return []
    notes = ["", "step: median of all; spread: lowest and highest median of the repetitions"]
    if len(results.measured) > 1:
        notes.append(f"1.00x and +0.0000: against {label(first, results)}")
    alike = without_winner(results)
    if alike:
        notes.append(f"no row is best for {', '.join(alike)}: they differ by no more than repetitions do")
    if any(row.parts for row in results.measured):
        notes.append("step: a few more steps, taken apart by torch's profiler")
    if any(row.peak_memory_bytes is not None for row in results.measured):
        notes.append(
            f"memory: of the rank that takes most, its model states and (estimate); {memory_note(results)}"
        )
    return notes


def rows_csv(results: Results) -> str:
    """The rows as CSV by RFC 4180: a header with units in its names, then a line a row; nothing is rounded.

    Unknown values are empty. The columns are the same, in the same order, for all results.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=CRLF)
    writer.writerow(CSV)
    writer.writerows([column.value(results, row) for column in CSV.values()] for row in results.rows)
    return text.getvalue()
