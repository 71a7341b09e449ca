"""Tables for a terminal, a line a row: where there is no room, the least important columns are left out, and named."""

from __future__ import annotations

import io
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

GAP = 2


def terminal_width() -> int:
    """Columns of the terminal: ``COLUMNS`` if set, 80 where there is none."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int) -> list[str]:
    """A text in lines, broken at spaces where there are some; one that fits stays as it is."""
    fits = len(text) <= width
    return [text] if fits else textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


@dataclass(frozen=True, kw_only=True)
class Head:
    """A column of a table.

    Args:
        text: Its heading.
        align: Of its cells.
        drop: Of the columns that may be left out, the one with the highest goes first; 0: it stays.
        folds: Whether a long text of it goes on below, rather than making the column wide.
    """

    text: str
    align: Literal["left", "right"] = "left"
    drop: int = 0
    folds: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for rich's console, which says how wide it may be, with notes below it."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

        columns = zip(*([head.text for head in self.heads], *self.rows), strict=True)
        widths = [max(map(cell_len, texts)) for texts in columns]
        widths = [
            min(8, width) if head.folds else width for head, width in zip(self.heads, widths, strict=True)
        ]
        kept, dropped = list(range(len(self.heads))), []
        for at in sorted(kept, key=lambda at: (-self.heads[at].drop, -at)):
            if self.heads[at].drop and sum(widths[each] + GAP for each in kept) - GAP > options.max_width:
                kept.remove(at)
                dropped.append(self.heads[at].text.partition(",")[0])
        table = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for head in (self.heads[at] for at in kept):
            table.add_column(Text(head.text), justify=head.align, overflow="fold", no_wrap=not head.folds)
        for row in self.rows:
            table.add_row(*(Text(row[at]) for at in kept))
        if kept:
            yield table
        for note in [*self.notes, *([f"no room here for: {', '.join(dropped)}"] if dropped else [])]:
            yield Text(note, style="dim", overflow="fold")

    def lines(self) -> list[str]:
        """The table as plain lines, as wide as the terminal."""
        from rich.console import Console

        console = Console(width=terminal_width(), file=io.StringIO(), color_system=None)
        with console.capture() as captured:
            console.print(self)
        return [line.rstrip() for line in captured.get().splitlines()]
