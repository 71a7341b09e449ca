"""What pictures are made of: bars with their numbers, names beside them, a note of what is missing."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from determined_ds.report.formatting import label, number, unmeasured
from determined_ds.report.results import Results, Row
from determined_ds.report.style import FONT_PT, INK, MUTED, ROW_IN, SMALL_PT, colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LONGEST_LABEL = 54  # of a name, on lines of:
LABEL_WIDTH = 20
LINE_IN = 0.15  # of a line of a name
NOTE_WIDTH = 74
APART = 0.45  # between bars of other numbers of slots
ROOM = 1.22  # of an axis beside its longest bar, for the number


def height_of(rows: Sequence[Row], results: Results) -> float:
    """Inches that bars of these rows take, their names beside them."""
    lines = max(name.count("\n") + 1 for name in labels_of(rows, results))
    return max(0.6, max(ROW_IN, 0.05 + LINE_IN * lines) * (places_of(rows)[-1] + 1))


def labels_of(rows: Sequence[Row], results: Results) -> list[str]:
    """The rows' names, long ones on several lines; no two rows that differ have the same."""
    names = [label(row, results, ", ", LONGEST_LABEL) for row in rows]
    return ["\n".join(textwrap.wrap(name, LABEL_WIDTH, break_on_hyphens=False)) or name for name in names]


def places_of(rows: Sequence[Row]) -> list[float]:
    """Where each row's bar is, downwards: those on as many slots together, where they follow each other."""
    changes = [before.slots != row.slots for before, row in itertools.pairwise(rows)]
    together = sum(changes) == len({row.slots for row in rows}) - 1
    places = [0.0]
    for is_other in changes:
        places.append(places[-1] + (1 + APART if is_other and together else 1))
    return places


def bars(
    panel: Axes,
    results: Results,
    rows: Sequence[Row],
    values: Sequence[float],
    spreads: Sequence[tuple[float, float]] | None = None,
    reach: Sequence[float] = (),
) -> None:
    """Bars from zero, with whiskers where there are spreads; each has its number right of all that is drawn of it."""
    colour = colours(results)
    whiskers = spreads or [(value, value) for value in values]
    ends = reach or [max(value, high) for value, (_, high) in zip(values, whiskers, strict=True)]
    for at, row, value, (low, high), end in zip(places_of(rows), rows, values, whiskers, ends, strict=True):
        panel.barh(at, value, 0.7, color=colour[row.name])
        if low < high:
            panel.errorbar(
                value,
                at,
                xerr=[[max(0, value - low)], [max(0, high - value)]],
                color=INK,
                elinewidth=1.2,
                capsize=3,
            )
        beside(panel, end, at, number(value, 3))
    name_bars(panel, results, rows)
    panel.set_xlim(0, ROOM * max(ends) or 1)


def name_bars(panel: Axes, results: Results, rows: Sequence[Row], places: Sequence[float] = ()) -> None:
    """The rows' names at the left, the first on top."""
    places = list(places or places_of(rows))
    names = labels_of(rows, results)
    size = SMALL_PT if any("\n" in name for name in names) else FONT_PT
    panel.set_yticks(places, names, color=INK, fontsize=size, linespacing=1.05)
    panel.set_ylim(places[-1] + 0.6, -0.6)
    panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    panel.tick_params(axis="x", length=3)


def beside(panel: Axes, value: float, at: float, text: str, colour: str = INK, gap: float = 5) -> None:
    """A text right of where a bar ends."""
    panel.annotate(
        text,
        (value, at),
        xytext=(gap, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontsize=SMALL_PT,
    )


def note_missing(figure: Figure, results: Results, *, of_pipelines: bool = False) -> None:
    """Below the axes, what is not in them, and why."""
    missing = [row for row in unmeasured(results) if row.is_pipeline or not of_pipelines]
    if not missing:
        return
    named = "; ".join(f"{label(row, results, ', ')} ({row.status})" for row in missing)
    lines = textwrap.wrap(f"Not measured: {named}", NOTE_WIDTH, max_lines=4, placeholder=" …")
    figure.set_figheight(figure.get_figheight() + 0.17 * len(lines))
    figure.supxlabel("\n".join(lines), x=0.015, ha="left", fontsize=SMALL_PT, color=MUTED, linespacing=1.35)
