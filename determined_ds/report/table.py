"""Results as a table for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from determined_ds.report.columns import COLUMNS, CSV, UNKNOWN, Column
from determined_ds.report.formatting import label, memory_note, percent, reason, shortened, squeezed
from determined_ds.report.results import Results, Row

if TYPE_CHECKING:
    from rich.table import Table

LONGEST = 24  # of a name
LONGEST_REASON = 240
GAP = 2
CRLF = "\r\n"
# Each column as its lines, made of the columns that they name; the first of a line gives the heading.
LINES: tuple[tuple[str, ...], ...] = (
    ("{name}", "{shares}"),
    ("{slots}", "{micro}"),
    ("{step_median_s}", "{spread}"),
    ("{step_p95_s}",),
    ("{samples_per_s} {samples_per_s_against_first:>5}", "{tokens_per_s}"),
    (
        "{peak_memory_bytes} {peak_memory_against_first:>5}",
        "{model_state_bytes} ({estimated_model_state_bytes})",
    ),
    ("{loss}", "{loss_against_first}"),
)
Cell = Sequence[str]  # its lines
Place = tuple[int, Literal["left", "right"]]  # width and alignment


def results_table(results: Results) -> Table:
    """The table for a terminal of 80 columns or more, two lines for each row.

    The reason why a row was not measured spans the columns; a pipeline has its bubble below. Ratios and differences
    are against the first measured row.

    Args:
        results: What was measured.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    columns = [
        [first, *(line for line in rest if _leading(line).is_known(results))] for first, *rest in LINES
    ]
    heads = [[_leading(line).heading(results) for line in lines] for lines in columns]
    rows = [_cells(columns, results, row) for row in results.rows]
    every: list[Sequence[Cell]] = [heads, *rows]
    widths = [max(cell_len(line) for cells in every for line in cells[at]) for at in range(len(heads))]
    places: list[Place] = [
        (width, _leading(lines[0]).align) for width, lines in zip(widths, columns, strict=True)
    ]
    across: list[Place] = [*places[:2], (sum(widths[2:]) + GAP * (len(widths) - 3), "left")]
    table = Table.grid()
    table.add_column(max_width=sum(widths) + GAP * (len(widths) - 1))
    table.add_row(_line(heads, places, "bold", "bold"))
    for row, cells in zip(results.rows, rows, strict=True):
        if not row.is_measured:
            why = shortened(reason(row), LONGEST_REASON)
            table.add_row(_line([*cells[:2], [why]], across, "bold", "yellow"))
            continue
        table.add_row(_line(cells, places, "bold", ""))
        if row.bubble is not None:
            bubble = (
                f"bubble {percent(row.bubble)} of the time; {percent(row.bubble_ideal)} by the schedule alone"
            )
            table.add_row(_line([[], [], [bubble]], across, "", ""))
    for note in _footnotes(results):
        table.add_row(Text(note, "dim"))
    return table


def _leading(line: str) -> Column:
    found = re.match(r"{(\w+)", line)
    assert found is not None, line
    return COLUMNS[found[1]]


def _cells(columns: Sequence[Cell], results: Results, row: Row) -> list[Cell]:
    texts = {name: column.shown(results, row) for name, column in COLUMNS.items() if column.head}
    texts["name"] = squeezed(texts["name"], LONGEST)
    cells = [[line.format_map(texts) for line in lines] for lines in columns]
    return [[lines[0], *("" if line == UNKNOWN else line for line in lines[1:])] for lines in cells]


def _line(cells: Sequence[Cell], places: Sequence[Place], first_style: str, style: str) -> Table:
    """Cells side by side, as a table of their own: a reason spans columns. On a narrow terminal the first shrinks."""
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, GAP, 0, 0), expand=True, pad_edge=False)
    line.add_column(ratio=1, min_width=8, overflow="fold")
    for width, align in places[1:]:
        line.add_column(justify=align, width=width, overflow="fold")
    texts = []
    for index, lines in enumerate(cells):
        above = Text(lines[0] if lines else "", style if index else first_style)
        texts.append(Text("\n").join([above, *(Text(each, style or "dim") for each in lines[1:])]))
    line.add_row(*texts)
    return line


def _footnotes(results: Results) -> list[str]:
    first = results.first
    if first is None:
        return []
    notes = ["", "step: median of all; spread: lowest and highest median of the repetitions"]
    if len(results.measured) > 1:
        notes.append(f"1.00x and +0.0000: against {label(first, results)}")
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
