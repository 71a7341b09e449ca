"""Steps taken apart, a bar for each strategy: as long as its median step, divided as torch's profiler saw it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from determined_ds.report.bars import ROOM, beside, height_of, name_bars, note_missing, places_of
from determined_ds.report.formatting import LEAST_SHARE, number, step_unit
from determined_ds.report.repetition import PARTS
from determined_ds.report.results import Results
from determined_ds.report.style import MUTED, PALETTE, SMALL_PT, drawing, figure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEGEND_IN = 0.5
COLOURS = {part: PALETTE[index] for index, part in enumerate(PARTS)}


def parts_picture(results: Results) -> Figure | None:
    """Where the time of each row's steps goes.

    None where no steps were taken apart.
    """
    rows = [(row, row.parts) for row in results.measured]
    known = [(row, shares) for row, shares in rows if shares]
    if not known:
        return None
    shown, steps = [row for row, _ in known], [row.median_step_seconds for row, _ in known]
    in_time = None not in steps
    name, unit = step_unit(results) if in_time else ("% of a step", 0.01)
    lengths = [(seconds if in_time and seconds else 1) / unit for seconds in steps]
    there = [part for part in PARTS if any(shares.get(part, 0) >= LEAST_SHARE for _, shares in known)]
    with drawing():
        figure, (panel,) = figure_of([height_of(shown, results) + LEGEND_IN])
        for at, length, (_, shares) in zip(places_of(shown), lengths, known, strict=True):
            begin = 0.0
            for part in there:
                width = shares.get(part, 0.0) * length
                panel.barh(at, width, 0.7, left=begin, color=COLOURS[part], label=part if at == 0 else None)
                begin += width
            beside(panel, begin, at, number(length, 3) if in_time else "")
        name_bars(panel, results, shown)
        panel.set_xlim(0, (ROOM if in_time else 1) * max(lengths))
        panel.set_title("A step taken apart")
        panel.set_xlabel(f"{name} of a median step" if in_time else name)
        note_missing(figure, results)
        figure.legend(
            loc="outside upper left",
            ncols=4,
            frameon=False,
            fontsize=SMALL_PT,
            labelcolor=MUTED,
            handlelength=1.0,
        )
    return figure
