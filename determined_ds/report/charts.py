"""Results and profiles as pictures.

Bars begin at zero, are named where they stand, and carry their number; a strategy has one colour in all pictures, and
so has a part of a step.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined_ds.report.columns import LEAST_SHARE, label, step_unit
from determined_ds.report.numbers import byte_unit, count, number, percent
from determined_ds.report.results import PARTS, WINDOW, Results, Row
from determined_ds.report.style import (
    FONT_PT,
    GROUND,
    INK,
    MUTED,
    PART_COLOURS,
    SMALL_PT,
    drawing,
    figure_of,
    ink_on,
    strategy_colours,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_WIDTH = 20  # characters of a line
ROW_IN, LINE_IN = 0.27, 0.15  # of a bar and the space around it; of a line of its name
ROOM = 1.22  # of an axis beside its longest bar, for the number
DOT: dict[str, Any] = {"markeredgecolor": GROUND, "markersize": 7, "zorder": 4}
STATES = "model_state_bytes"
MOST_RANKS = 32  # bars; of more ranks, those with the longest and the shortest steps
ROOMY = 0.09  # share of the longest bar in which a number fits


def _names(results: Results, rows: Sequence[Row]) -> list[str]:
    names = [label(row, results, ", ") for row in rows]
    return ["\n".join(textwrap.wrap(name, LABEL_WIDTH, break_on_hyphens=False)) or name for name in names]


def _height(results: Results, rows: Sequence[Row]) -> float:
    """Of the bars of some rows, in inches."""
    lines = max(name.count("\n") + 1 for name in _names(results, rows))
    return max(0.6, max(ROW_IN, 0.05 + LINE_IN * lines) * len(rows))


def _name_bars(panel: Axes, names: Sequence[str]) -> None:
    """Write the names at the left, the first on top."""
    size = SMALL_PT if any("\n" in name for name in names) else FONT_PT
    panel.set_yticks(range(len(names)), names, color=INK, fontsize=size, linespacing=1.05)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    panel.tick_params(axis="x", length=3)


def _beside(panel: Axes, value: float, at: float, text: str, colour: str = INK, gap: float = 5) -> None:
    """A text right of where a bar ends."""
    how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL_PT}
    panel.annotate(text, (value, at), xytext=(gap, 0), color=colour, **how)


def _bars(
    panel: Axes,
    results: Results,
    rows: Sequence[Row],
    values: Sequence[float],
    *,
    spreads: Sequence[tuple[float, float]] = (),
    marks: Sequence[float] = (),
) -> None:
    """A bar a row, with its number; with whiskers and upright marks, where there are some."""
    _name_bars(panel, _names(results, rows))
    colours, ends = strategy_colours(results), list(values)
    panel.barh(range(len(rows)), values, 0.7, color=[colours[row.name] for row in rows])
    for at, (low, high) in enumerate(spreads):
        if low < high:
            error = [[max(0, values[at] - low)], [max(0, high - values[at])]]
            panel.errorbar(values[at], at, xerr=error, color=INK, elinewidth=1.2, capsize=3)
        ends[at] = max(values[at], high)
    for at, end in enumerate(ends):
        _beside(panel, end, at, number(values[at], 3))
    for at, mark in enumerate(marks):
        panel.plot([mark] * 2, [at - 0.43, at + 0.43], color=INK, solid_capstyle="butt")
    panel.set_xlim(0, ROOM * max([*ends, *marks]) or 1)


def _legend(figure: Figure, panel: Axes, where: str) -> None:
    handles, names = panel.get_legend_handles_labels()
    each_once = dict(zip(names, handles, strict=True))
    how: dict[str, Any] = {"frameon": False, "fontsize": SMALL_PT, "labelcolor": MUTED, "handlelength": 1.0}
    how |= {"loc": f"outside {where} left", "ncols": 4}
    figure.legend(list(each_once.values()), list(each_once), **how)


# ------------------------------------------------------------------------------------------- of a comparison


def throughput(results: Results) -> Figure | None:
    """Samples per second, with the lowest and the highest repetition as whiskers."""
    rows = [row for row in results.measured if row.samples_per_second is not None]
    if not rows:
        return None
    with drawing():
        figure, (panel,) = figure_of([_height(results, rows)])
        spreads = [row.samples_per_second_spread or (0.0, 0.0) for row in rows]
        _bars(panel, results, rows, [row.samples_per_second or 0.0 for row in rows], spreads=spreads)
        panel.set_title("Throughput")
        repeated = any(len(row.repetitions) > 1 for row in rows)
        panel.set_xlabel("samples per second" + ("; whiskers: repetitions" if repeated else ""))
    return figure


def memory(results: Results) -> Figure | None:
    """Peak memory of the rank that took most, and its model states, with the estimates as marks on them."""
    kind = "resident" if results.accelerator == "cpu" else "device"
    shown = []
    for title, of, words in (
        ("Peak memory", "peak_memory_bytes", f" of {kind} memory"),
        ("Model states", STATES, ""),
    ):
        if rows := [row for row in results.measured if getattr(row, of) is not None]:
            shown.append((f"{title} of a rank", of, words, rows))
    if not shown:
        return None
    with drawing():
        figure, panels = figure_of([_height(results, rows) for *_, rows in shown])
        for panel, (title, of, words, rows) in zip(panels, shown, strict=True):
            values, marks = [getattr(row, of) for row in rows], []
            if of == STATES and all(row.estimated_model_state_bytes for row in rows):
                marks = [row.estimated_model_state_bytes or 0 for row in rows]
                words += "; the upright line is the estimate"
            unit, size = byte_unit([*values, *marks])
            _bars(panel, results, rows, [v / size for v in values], marks=[mark / size for mark in marks])
            panel.set_title(title)
            panel.set_xlabel(unit + words)
    return figure


def _stacked(panel: Axes, at: int, widths: Mapping[str, float], texts: Mapping[str, str]) -> float:
    """A bar of the parts of a step side by side, some with a text in them; returns where it ends."""
    end = 0.0
    for part, width in widths.items():
        colour = PART_COLOURS[part]
        panel.barh(at, width, 0.7, left=end, color=colour, label=part)
        how: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT, "color": ink_on(colour)}
        panel.text(end + width / 2, at, texts.get(part, ""), **how)
        end += width
    return end


def parts(results: Results) -> Figure | None:
    """Where the time of each row's steps goes: as long as its median step, divided as torch's profiler saw it."""
    rows = [(row, row.parts) for row in results.measured if row.parts]
    if not rows:
        return None
    named, (unit_name, unit) = [row for row, _ in rows], step_unit(results)
    there = [part for part in PARTS if any(shares.get(part, 0) >= LEAST_SHARE for _, shares in rows)]
    with drawing():
        figure, (panel,) = figure_of([_height(results, named) + 0.5])
        lengths = [(row.median_step_seconds or 0) / unit for row, _ in rows]
        for at, (length, (_, shares)) in enumerate(zip(lengths, rows, strict=True)):
            end = _stacked(panel, at, {part: shares.get(part, 0.0) * length for part in there}, {})
            _beside(panel, end, at, number(length, 3))
        _name_bars(panel, _names(results, named))
        panel.set_xlim(0, ROOM * max(lengths))
        panel.set_title("A step taken apart")
        panel.set_xlabel(f"{unit_name} of a median step")
        _legend(figure, panel, "upper")
    return figure


def loss(results: Results) -> Figure | None:
    """The loss against seconds of training, and when each row comes to the loss that all of them reach."""
    rows, target = [row for row in results.measured if row.loss_curve], results.target_loss
    if target is None:
        return None
    colours, most = strategy_colours(results), max(row.slots for row in rows)
    with drawing():
        figure, (curves, times) = figure_of([2.1, _height(results, rows)])
        for at, row in enumerate(rows):
            times_s, losses = zip(*row.loss_curve, strict=True)
            style: Any = "-" if row.slots == most else (0, (4, 2))
            colour, seconds = colours[row.name], row.seconds_to(target)
            curves.plot(times_s, losses, color=colour, linestyle=style)
            if seconds is None:
                _beside(times, 0, at, "not reached", MUTED)
                continue
            curves.plot(seconds, target, "o", color=colour, **DOT)
            times.barh(at, seconds, 0.12, color=colour)
            times.plot(seconds, at, "o", color=colour, **DOT)
            _beside(times, seconds, at, f"{number(seconds, 3)} s", gap=8)
        curves.axhline(target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        curves.set_title(f"Loss; the dots are at {number(target)}")
        curves.set_ylabel(f"loss, mean of {WINDOW} steps")
        if any(row.slots < most for row in rows):
            curves.set_xlabel(f"dashed: on fewer than {count(most, 'slot')}")
        curves.grid(axis="y")
        _name_bars(times, _names(results, rows))
        times.set_title(f"Time to a loss of {number(target)}")
        times.set_xlabel("seconds of training")
        for panel in (curves, times):
            panel.set_xlim(0, max(row.loss_curve[-1][0] for row in rows) * 1.16)
            panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    return figure


# Of a comparison: its name -> what draws it, and what to see in it.
CHARTS: dict[str, tuple[Callable[[Results], Figure | None], str]] = {
    "throughput": (
        throughput,
        "Longer is faster. Where whiskers overlap, these measurements do not show which is faster; what was measured"
        " once has none.",
    ),
    "memory": (
        memory,
        "Shorter is better. On a CPU the peak is the whole process, torch itself included: it hides what the states"
        " show. The estimate of the states is what the memory model expects before anything runs.",
    ),
    "parts": (
        parts,
        "A few steps after those that were timed, recorded by torch's profiler: its shares of the median step.",
    ),
    "loss": (
        loss,
        "Further left is sooner. The loss is the highest that any ended at, so that all come to it; starting up is not"
        " counted.",
    ),
}


# ------------------------------------------------------------------------------------------- of a run


def profile_picture(profile: Mapping[str, Any]) -> Figure | None:
    """A bar a rank, made of the parts of its mean step; None where no step was recorded.

    Args:
        profile: Of ``profile.json``.
    """
    ranks = [rank for rank in profile["ranks"] if rank["step_s"]]
    if not ranks:
        return None
    if len(ranks) > MOST_RANKS:
        by_length = sorted(ranks, key=lambda rank: rank["step_s"])
        kept = [*by_length[: MOST_RANKS // 2], *by_length[-MOST_RANKS // 2 :]]
        ranks = sorted(kept, key=lambda rank: rank["rank"])
    there = [part for part in PARTS if any(rank["seconds"].get(part) for rank in ranks)]
    roomy_s = ROOMY * max(rank["step_s"] for rank in ranks)
    with drawing():
        figure, (panel,) = figure_of([max(0.6, ROW_IN * len(ranks)) + 0.45])
        for at, rank in enumerate(ranks):
            seconds = {part: rank["seconds"].get(part, 0.0) for part in there}
            texts = {part: percent(s / rank["step_s"]) for part, s in seconds.items() if s > roomy_s}
            _stacked(panel, at, {part: 1000 * s for part, s in seconds.items()}, texts)
        panel.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks], color=INK)
        panel.set_ylim(len(ranks) - 0.4, -0.6)
        panel.set_xlabel("milliseconds of a mean step")
        left_out = len(profile["ranks"]) - len(ranks)
        panel.set_title("A step taken apart" + (f" ({left_out} ranks are left out)" if left_out else ""))
        _legend(figure, panel, "lower")
    return figure
