"""Tables of plain text that fit a terminal, whatever stands in them.

Where a table is wider than the terminal, in this order: columns that may stand below their rows go there (below
the table, where all rows have the same); a name that
is too long for its column takes a line above its row, whole; the least important columns are dropped, and named in
a note. No text is shortened, so rows always remain distinguishable.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

GAP = 2
INDENT = 2  # of what stands below a row
NARROWEST = 8  # of the column whose long texts stand above their rows
HEADING, NAME, SMALL, PLAIN = "bold", "bold", "dim", ""

Cell = tuple[str, ...]  # its lines, the first of them the value
Part = tuple[str, str]  # a text and its style
Line = tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class FittedColumn:
    """A column, and what becomes of it where there is no room.

    Args:
        head: Lines of the heading.
        align: Of its cells.
        no_room: ``keep`` it; ``drop`` it; move it ``below`` the rows; or, of the first column alone, move long texts
            ``above`` their rows.
        rank: Of the columns that may be dropped, the one with the highest goes first.
        style: Of the cells' first lines.
    """

    head: Cell
    align: Literal["left", "right"] = "left"
    no_room: Literal["keep", "drop", "below", "above"] = "keep"
    rank: int = 0
    style: str = PLAIN


@dataclass(frozen=True, kw_only=True)
class FittedRow:
    """A row.

    Args:
        cells: One for each column; fewer, where ``rest`` stands in place of the others.
        rest: A text across what is left of the line.
        below: Texts on lines of their own.
        style: Of ``rest``, or of the whole row where a column has no style.
    """

    cells: Sequence[Cell]
    rest: str = ""
    below: Sequence[str] = ()
    style: str = PLAIN


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A table for rich's console, which says how wide it may be.

    Args:
        columns: From left to right.
        rows: From top to bottom.
        notes: Lines below the table.
    """

    columns: Sequence[FittedColumn]
    rows: Sequence[FittedRow]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in fitted(self.columns, self.rows, options.max_width, notes=self.notes):
            yield _rich(line)


def fitted(
    columns: Sequence[FittedColumn], rows: Sequence[FittedRow], width: int, *, notes: Sequence[str] = ()
) -> list[Line]:
    """The lines of a table, none wider than ``width`` cells.

    Args:
        columns: From left to right.
        rows: From top to bottom.
        width: Of the terminal.
        notes: Lines below the table.
    """
    plan = _Plan(columns, rows, width)
    lines = [*plan.lines(FittedRow(cells=[column.head for column in columns]), is_heading=True)]
    for row in rows:
        lines += plan.lines(row)
    notes = [*notes, *plan.alike]
    if plan.dropped:
        notes = [*notes, f"no room here for: {', '.join(plan.dropped)}"]
    for note in notes:
        lines += [((each, SMALL),) for each in wrapped(note, width)]
    return lines


def plain(line: Line) -> str:
    """The text of a line."""
    return "".join(text for text, _ in line).rstrip()


def terminal_width() -> int:
    """Columns of the terminal: ``COLUMNS`` if set, 80 where there is none."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int) -> list[str]:
    """A text in lines, broken at spaces where there are some; one that fits stays as it is."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= width:
        return [text]
    lines = textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]
    return [
        part for line in lines for part in (chop_cells(line, width) if cell_len(line) > width else [line])
    ]


class _Plan:
    """Which columns there are, how wide, and which texts stand above or below a row."""

    def __init__(self, columns: Sequence[FittedColumn], rows: Sequence[FittedRow], width: int) -> None:
        from rich.cells import cell_len

        self._len: Callable[[str], int] = cell_len
        self._columns, self._width = columns, width
        every: list[Sequence[Cell]] = [[column.head for column in columns], *(row.cells for row in rows)]
        self._widths = [
            max(
                (cell_len(text) for cells in every for cell in cells[at : at + 1] for text in cell), default=0
            )
            for at in range(len(columns))
        ]
        self._beside = [at for at in range(len(columns)) if self._widths[at]]
        self._below: list[int] = []
        self.alike: list[str] = []
        self.dropped: list[str] = []
        for at in reversed(range(len(columns))):
            if columns[at].no_room == "below" and not self._fits():
                self._beside.remove(at)
                cells = {row.cells[at] for row in rows if at < len(row.cells)}
                if len(cells) == 1 < len(rows):
                    self.alike.append(f"in every row: {columns[at].head[0]} {' '.join(*cells)}")
                else:
                    self._below.insert(0, at)
        if columns and columns[0].no_room == "above" and not self._fits():
            natural = self._widths[0]
            others = [line for cells in every for line in (cells[0][1:] if cells else ())]
            least = max([NARROWEST, *map(cell_len, columns[0].head), *map(cell_len, others)])
            self._widths[0] = min(natural, least)
            self._drop()
            self._widths[0] = min(natural, self._widths[0] + max(0, width - self._total()))
        self._drop()

    def _total(self) -> int:
        return sum(self._widths[at] for at in self._beside) + GAP * (len(self._beside) - 1)

    def _fits(self) -> bool:
        return self._total() <= self._width

    def _drop(self) -> None:
        """Drop columns, the least important first, until the others fit."""
        may = sorted((at for at in self._beside if self._columns[at].no_room == "drop"), key=self._importance)
        while may and not self._fits():
            at = may.pop(0)
            self._beside.remove(at)
            self.dropped.append(" / ".join(line for line in self._columns[at].head if line))

    def _importance(self, at: int) -> tuple[int, int]:
        return -self._columns[at].rank, -at

    def lines(self, row: FittedRow, *, is_heading: bool = False) -> Iterator[Line]:
        """A row's lines."""
        cells = [*row.cells]
        if cells and not is_heading and self._len("".join(cells[0][:1])) > self._widths[0] and self._beside:
            style = self._columns[0].style or row.style
            yield from (((text, style),) for text in wrapped(cells[0][0], self._width))
            cells[0] = cells[0][1:]
        beside = [at for at in self._beside if at < len(cells)]
        start = sum(self._widths[at] + GAP for at in beside)
        rest = wrapped(row.rest, max(NARROWEST, self._width - start)) if row.rest else []
        count = max([len(rest), *(len(cells[at]) for at in beside)], default=0)
        for index in range(count):
            parts = [self._part(at, cells[at], index, row, is_heading=is_heading) for at in beside]
            if index < len(rest):
                parts.append((rest[index], row.style))
            if any(text.strip() for text, _ in parts):
                yield from self._within(parts)
        for at in [] if is_heading else [at for at in self._below if at < len(cells)]:
            text = " ".join(line for line in cells[at] if line)
            if text:
                yield from self._indented(f"{self._columns[at].head[0]} {text}")
        for text in row.below:
            yield from self._indented(text)

    def _part(self, at: int, cell: Cell, index: int, row: FittedRow, *, is_heading: bool) -> Part:
        text = cell[index] if index < len(cell) else ""
        column = self._columns[at]
        blank = " " * (self._widths[at] - self._len(text))
        style = HEADING if is_heading else (column.style or row.style) if not index else row.style or SMALL
        return (f"{blank}{text}" if column.align == "right" else f"{text}{blank}"), style

    def _within(self, parts: list[Part]) -> Iterator[Line]:
        """Parts side by side; folded where even the columns that must stay are too wide."""
        line = tuple(part for each in parts for part in (each, (" " * GAP, PLAIN)))[:-1]
        if self._len(plain(line)) <= self._width:
            yield line
            return
        yield from (((text, parts[0][1]),) for text in wrapped(" ".join(plain(line).split()), self._width))

    def _indented(self, text: str) -> Iterator[Line]:
        for each in wrapped(text, max(1, self._width - INDENT)):
            yield ((" " * INDENT + each, PLAIN),) if self._width > INDENT else ((each, PLAIN),)


def _rich(line: Line) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ignore")
    for part, style in line:
        text.append(part, style)
    text.rstrip()
    return text
