"""Numbers as people read them, the same in tables, on pages, in pictures and on the panel; tables for a terminal."""

from __future__ import annotations

import io
import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from determined_ds.memory.units import GIB, KIB, MIB, TIB

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

UNKNOWN = "–"
SMALLEST, LARGEST = 1e-6, 1e12  # of the numbers that are written out
GAP = 2  # between columns of a table


def number(value: float | None, digits: int = 4) -> str:
    """To so many digits: ``97.43``, ``328.4``; whole numbers keep all of theirs: ``41,984``."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if not SMALLEST <= abs(value) < LARGEST:  # what no measurement gives, a loss that runs away
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def short_number(value: float) -> str:
    """For a narrow space: at most four digits, without zeros at the end; thousands are grouped."""
    if math.isfinite(value) and (1000 <= abs(value) < 1e7 or (value == int(value) and abs(value) < 1e7)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def loss_text(value: float | None) -> str:
    """A loss, to five digits: ``2.6844``."""
    return number(value, 5)


def difference(value: float) -> str:
    """With its sign: ``+0.0021``."""
    return f"{value:+.4f}" if abs(value) < 1000 else ("+" if value > 0 else "") + number(value)


def ratio(value: float) -> str:
    """``1.03x``."""
    return f"{number(value, 3) if value >= 10 else f'{value:.2f}'}x"


def percent(share: float | None, decimals: int = 1) -> str:
    """``11.1 %``."""
    return UNKNOWN if share is None else f"{100 * share:.{decimals}f} %"


def span(low: float, high: float) -> str:
    """Lowest to highest: ``96.9–98.1``; one number where both read the same."""
    ends = number(low), number(high)
    return ends[0] if ends[0] == ends[1] else "–".join(ends)


def short_span(low: float, high: float) -> str:
    """The same in a narrow space, and in ASCII: ``0.68..0.71``."""
    ends = f"{low:.3g}", f"{high:.3g}"
    return ends[0] if ends[0] == ends[1] else "..".join(ends)


def count(value: int, thing: str) -> str:
    """``1 slot``, ``2,048 slots``."""
    return f"{value:,} {thing}{'s' * (value != 1)}"


def rate(value: float, unit: str) -> str:
    """``164 samples/s``."""
    return f"{value:,.{0 if value >= 100 else 1}f} {unit}/s"


def seconds_text(seconds: float) -> str:
    """A time of a step: ``3.2 ms``, ``412 ms``, ``2.41 s``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"


def duration(seconds: float | None) -> str:
    """A time that people wait: ``5.3 s``, ``41 s``, ``12 min 5 s``, ``3 h 5 min``, ``2 d 7 h``."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{max(0, seconds):.3g} s"
    for large, small, unit, below in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        whole = round(seconds / small) * small
        if whole >= large:
            return f"{whole // large} {unit} {whole % large // small} {below}"
    return f"{seconds:.0f} s"


def date_text(at: datetime) -> str:
    """``20 November 2026, 18:40 UTC``."""
    return f"{at.day} {at:%B %Y, %H:%M}{f' {at.tzname()}' if at.tzinfo else ''}"


def byte_unit(sizes: Iterable[int | None]) -> tuple[str, int]:
    """The unit for several sizes, and its bytes: the largest that the largest of them is ten times of."""
    largest = max((size for size in sizes if size is not None), default=0)
    units = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
    return next(((name, size) for name, size in units if largest >= 10 * size), ("B", 1))


def printable(text: str) -> str:
    """A text on one line, with what moves a cursor or breaks a file written out: it came from outside."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(text.split()))


def shortened(text: str, most: int) -> str:
    """A text of so many characters at most."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


# ------------------------------------------------------------------------------------------- for a terminal


def terminal_width() -> int:
    """Columns of the terminal: ``COLUMNS`` if set, 80 where there is none."""
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int) -> list[str]:
    """A text in lines of so many columns, broken at spaces where there are some."""
    return textwrap.wrap(text, max(1, width), break_on_hyphens=False) or [""]


@dataclass(frozen=True, kw_only=True)
class Head:
    """A column of a table.

    Args:
        text: Its heading.
        align: Of its cells.
        drop: Where there is no room, the column with the highest goes first; 0: it stays.
        folds: Whether a long text of it goes on below, rather than making the column wide.
    """

    text: str
    align: Literal["left", "right"] = "left"
    drop: int = 0
    folds: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table for rich's console, with notes below it. Columns that have no room are left out, and named."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

        texts = zip(*([head.text for head in self.heads], *self.rows), strict=True)
        widths = [max(map(cell_len, column)) + GAP for column in texts]
        widths = [min(8 + GAP, w) if head.folds else w for head, w in zip(self.heads, widths, strict=True)]
        kept, dropped = list(range(len(self.heads))), []
        for at in sorted(kept, key=lambda at: (-self.heads[at].drop, -at)):
            if self.heads[at].drop and sum(widths[each] for each in kept) - GAP > options.max_width:
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
