"""Results as pictures: memory, throughput, time to a loss, scaling over slots, a pipeline's bubble.

Bars begin at zero, are named where they stand, and carry their number; a strategy has one colour in all pictures.
What was not measured is named below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from determined_ds.report.bars import (
    bars,
    beside,
    height_of,
    name_bars,
    note_missing,
    places_of,
)
from determined_ds.report.divided_steps import parts_picture
from determined_ds.report.formatting import byte_unit, label, name_of, number, percent, slots_text
from determined_ds.report.gantt import schedules_picture
from determined_ds.report.results import Results, Row
from determined_ds.report.style import GROUND, INK, MUTED, colours, drawing, figure_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOT: dict[str, Any] = {"markeredgecolor": GROUND, "markersize": 7, "zorder": 4}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of results.

    Args:
        name: Short and stable; the stem of its file.
        title: What it shows.
        draw: Draws it.
        is_wide: It takes the whole width of a page.
    """

    name: str
    title: str
    draw: Callable[[Results], Figure | None]
    is_wide: bool = False


def memory_picture(results: Results) -> Figure | None:
    """Peak memory of the rank that took most, and its model states measured beside the estimate.

    None where no memory was measured.
    """
    rows = [row for row in results.measured if row.peak_memory_bytes is not None]
    with_states = [row for row in results.measured if row.model_state_bytes is not None]
    if not rows and not with_states:
        return None
    with drawing():
        figure, panels = figure_of([height_of(each, results) for each in (rows, with_states) if each])
        if rows:
            name, size = byte_unit(row.peak_memory_bytes for row in rows)
            kind = "resident " if results.accelerator == "cpu" else "device "
            bars(panels[0], results, rows, [(row.peak_memory_bytes or 0) / size for row in rows])
            panels[0].set_title("Peak memory of a rank")
            panels[0].set_xlabel(f"{name} of {kind}memory")
        if with_states:
            _states(panels[-1], results, with_states)
        note_missing(figure, results)
    return figure


def throughput_picture(results: Results) -> Figure | None:
    """Samples per second, with the lowest and the highest repetition as whiskers.

    None where none is known.
    """
    rows = [row for row in results.measured if row.samples_per_second is not None]
    if not rows:
        return None
    with drawing():
        figure, (panel,) = figure_of([height_of(rows, results)])
        values = [row.samples_per_second or 0 for row in rows]
        spreads = [
            row.samples_per_second_spread or (value, value) for row, value in zip(rows, values, strict=True)
        ]
        bars(panel, results, rows, values, spreads)
        panel.set_title("Throughput")
        repeated = max(row.num_repetitions for row in rows) > 1
        panel.set_xlabel("samples per second" + ("; whiskers: repetitions" if repeated else ""))
        note_missing(figure, results)
    return figure


def loss_picture(results: Results) -> Figure | None:
    """The loss against seconds of training, and when each row comes to the loss that all of them reach.

    None where no loss is known.
    """
    rows = [row for row in results.measured if row.loss_curve]
    ends = [loss for row in rows if math.isfinite(loss := row.loss_curve[-1][1])]
    if not ends:
        return None
    target = max(ends)
    with drawing():
        figure, (curves, times) = figure_of([2.1, height_of(rows, results)])
        colour = colours(results)
        most = max(row.slots for row in rows)
        for row in rows:
            times_s, losses = [at for at, _ in row.loss_curve], [loss for _, loss in row.loss_curve]
            style = "-" if row.slots == most else (0, (4, 2))
            curves.plot(times_s, losses, color=colour[row.name], linestyle=style, label=label(row, results))
        curves.axhline(target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        reached = [row.seconds_to(target) for row in rows]
        for row, seconds in zip(rows, reached, strict=True):
            if seconds is not None:
                curves.plot(seconds, target, "o", color=colour[row.name], **DOT)
        curves.set_title(f"Loss; the dots are at {number(target)}")
        window = max(row.window for row in rows)
        curves.set_ylabel(f"loss, mean of {window} steps" if window > 1 else "loss")
        if any(row.slots < most for row in rows):
            curves.set_xlabel(f"dashed: on fewer than {slots_text(most)}")
        curves.grid(axis="y")
        longest = max(row.loss_curve[-1][0] for row in rows)
        _lollipops(times, results, rows, reached, f"Time to a loss of {number(target)}")
        for panel in (curves, times):
            panel.set_xlim(0, longest * 1.16)
            panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
        note_missing(figure, results)
    return figure


def scaling_picture(results: Results) -> Figure | None:
    """Scaling efficiency over slots, 100 % where nothing is lost.

    None unless some strategy was measured on two numbers of slots or more.
    """
    efficiency = [(row, results.scaling_efficiency(row)) for row in results.measured]
    known = [(row, share) for row, share in efficiency if share is not None]
    if not known:
        return None
    with drawing():
        figure, (panel,) = figure_of([2.4])
        colour = colours(results)
        lines: dict[str, list[tuple[int, float]]] = {}
        for row, share in known:
            lines.setdefault(row.name, []).append((row.slots, 100 * share))
        slots = sorted({row.slots for row, _ in known})
        places = {each: at for at, each in enumerate(slots)}
        panel.axhline(100, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        for name, points in lines.items():
            points.sort()
            at, shares = [places[each] for each, _ in points], [share for _, share in points]
            panel.plot(at, shares, "o-", color=colour[name], markersize=6, markeredgecolor=GROUND)
            row = next(row for row, _ in known if row.name == name)
            beside(panel, at[-1], shares[-1], f"{name_of(row, results, 18)}  {shares[-1]:.0f} %", gap=8)
        panel.set_ylim(0, max(110.0, *(share for points in lines.values() for _, share in points)) + 6)
        panel.set_xlim(-0.12 * len(slots), (len(slots) - 1) * 1.38)
        panel.set_xticks(range(len(slots)), [slots_text(each) for each in slots])
        panel.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
        panel.grid(axis="y")
        panel.set_title("Scaling efficiency")
        panel.set_ylabel("share of ideal throughput")
        note_missing(figure, results)
    return figure


def bubble_picture(results: Results) -> Figure | None:
    """Share of time that a pipeline's stages wait, measured beside what the schedule alone costs.

    None without a pipeline.
    """
    rows = [row for row in results.measured if row.bubble is not None]
    if not rows:
        return None
    with drawing():
        figure, (panel,) = figure_of([max(1.0, 0.56 * len(rows))])
        colour = colours(results)
        for at, row in enumerate(rows):
            measured, ideal = 100 * (row.bubble or 0), row.bubble_ideal
            panel.barh(at - 0.2, measured, 0.36, color=colour[row.name])
            beside(panel, measured, at - 0.2, f"{percent(row.bubble)} measured")
            if ideal is not None:
                panel.barh(at + 0.2, 100 * ideal, 0.36, color=colour[row.name], alpha=0.4)
                beside(panel, 100 * ideal, at + 0.2, f"{percent(ideal)} ideal", MUTED)
        name_bars(panel, results, rows, range(len(rows)))
        longest = max(100 * max(row.bubble or 0, row.bubble_ideal or 0) for row in rows)
        panel.set_xlim(0, 1.75 * longest or 1)
        panel.set_title("A pipeline's bubble")
        panel.set_xlabel("% of a step's time that its stages wait")
        note_missing(figure, results, of_pipelines=True)
    return figure


PICTURES = (
    Picture(name="throughput", title="Throughput", draw=throughput_picture),
    Picture(name="memory", title="Memory", draw=memory_picture),
    Picture(name="parts", title="A step taken apart", draw=parts_picture),
    Picture(name="loss", title="Time to a loss", draw=loss_picture),
    Picture(name="scaling", title="Scaling over slots", draw=scaling_picture),
    Picture(name="bubble", title="A pipeline's bubble", draw=bubble_picture),
    Picture(name="schedules", title="Schedules, planned and measured", draw=schedules_picture, is_wide=True),
)


def _states(panel: Axes, results: Results, rows: Sequence[Row]) -> None:
    unit, size = byte_unit(
        each for row in rows for each in (row.model_state_bytes, row.estimated_model_state_bytes)
    )
    values = [(row.model_state_bytes or 0) / size for row in rows]
    estimates = [row.estimated_model_state_bytes for row in rows]
    reach = [max(value, (each or 0) / size) for value, each in zip(values, estimates, strict=True)]
    bars(panel, results, rows, values, reach=reach)
    for at, estimate in zip(places_of(rows), estimates, strict=True):
        if estimate is not None:
            panel.plot(
                [estimate / size] * 2, [at - 0.43, at + 0.43], color=INK, linewidth=1.8, solid_capstyle="butt"
            )
    panel.set_title("Model states of a rank")
    line = "; the upright line is the estimate" if any(each is not None for each in estimates) else ""
    panel.set_xlabel(f"{unit}{line}")


def _lollipops(
    panel: Axes, results: Results, rows: Sequence[Row], seconds: Sequence[float | None], title: str
) -> None:
    colour = colours(results)
    for at, row, reached in zip(places_of(rows), rows, seconds, strict=True):
        if reached is None:
            beside(panel, 0, at, "not reached", MUTED)
            continue
        panel.barh(at, reached, 0.12, color=colour[row.name])
        panel.plot(reached, at, "o", color=colour[row.name], **DOT)
        beside(panel, reached, at, f"{number(reached, 3)} s", gap=8)
    name_bars(panel, results, rows)
    panel.set_title(title)
    panel.set_xlabel("seconds of training")
