"""Results and profiles as pictures.

Bars begin at zero, are named where they stand, and carry their number; a strategy has one colour in all pictures, and
so has a part of a step. What was not measured is named below.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined_ds.report.columns import LEAST_SHARE, step_unit
from determined_ds.report.numbers import byte_unit, count, number, percent
from determined_ds.report.results import PARTS, Results, Row
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
from determined_ds.report.verdict import label, unmeasured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_WIDTH, NOTE_WIDTH = 20, 74  # characters of a line
ROW_IN, LINE_IN = 0.27, 0.15  # of a bar and the space around it; of a line of its name
APART = 0.45  # between bars of other numbers of slots
ROOM = 1.22  # of an axis beside its longest bar, for the number
DOT: dict[str, Any] = {"markeredgecolor": GROUND, "markersize": 7, "zorder": 4}
DOTTED: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "linestyle": (0, (1, 2))}
MOST_RANKS = 32  # bars; of more ranks, those with the longest and the shortest steps
ROOMY = 0.09  # share of the longest bar in which a number fits


class Bars:
    """Where the bars of some rows are on an axis, the first on top, those of as many slots together."""

    def __init__(self, rows: Sequence[Row], results: Results) -> None:
        self.rows, self.colours = rows, strategy_colours(results)
        names = [label(row, results, ", ") for row in rows]
        self.names = [
            "\n".join(textwrap.wrap(name, LABEL_WIDTH, break_on_hyphens=False)) or name for name in names
        ]
        changes = [before.slots != row.slots for before, row in itertools.pairwise(rows)]
        together = sum(changes) == len({row.slots for row in rows}) - 1
        steps = (1 + APART * (is_other and together) for is_other in changes)
        self.places = list(itertools.accumulate(steps, initial=0.0))
        lines = max(name.count("\n") + 1 for name in self.names)
        self.height = max(0.6, max(ROW_IN, 0.05 + LINE_IN * lines) * (self.places[-1] + 1))  # inches

    def name(self, panel: Axes) -> None:
        """Write the names at the left."""
        size = SMALL_PT if any("\n" in name for name in self.names) else FONT_PT
        panel.set_yticks(self.places, self.names, color=INK, fontsize=size, linespacing=1.05)
        panel.set_ylim(self.places[-1] + 0.6, -0.6)
        panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
        panel.tick_params(axis="x", length=3)

    def draw(
        self, panel: Axes, values: Sequence[float], spreads: Sequence[tuple[float, float]] | None = None
    ) -> None:
        """Bars from zero, with whiskers where there are spreads; each has its number right of all that is drawn."""
        whiskers = spreads or [(value, value) for value in values]
        for at, row, value, (low, high) in zip(self.places, self.rows, values, whiskers, strict=True):
            panel.barh(at, value, 0.7, color=self.colours[row.name])
            if low < high:
                error = [[max(0, value - low)], [max(0, high - value)]]
                panel.errorbar(value, at, xerr=error, color=INK, elinewidth=1.2, capsize=3)
            _beside(panel, max(value, high), at, number(value, 3))
        self.name(panel)
        panel.set_xlim(0, ROOM * max(max(values), *(high for _, high in whiskers)) or 1)


def _beside(panel: Axes, value: float, at: float, text: str, colour: str = INK, gap: float = 5) -> None:
    """A text right of where a bar ends."""
    how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL_PT}
    panel.annotate(text, (value, at), xytext=(gap, 0), color=colour, **how)


def _stack(
    panel: Axes, at: float, pieces: Iterable[tuple[str, float, str]], roomy: float = math.inf
) -> float:
    """A bar of the parts of a step side by side: each a name, a width and what stands in it, if it is that wide.

    Returns where it ends.
    """
    end = 0.0
    for name, width, text in pieces:
        colour = PART_COLOURS[name]
        panel.barh(at, width, 0.7, left=end, color=colour, label=name)
        if width > roomy:
            how: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALL_PT}
            panel.text(end + width / 2, at, text, color=ink_on(colour), **how)
        end += width
    return end


def _legend(figure: Figure, panel: Axes, where: str) -> None:
    handles, names = panel.get_legend_handles_labels()
    each_once = dict(zip(names, handles, strict=True))
    how: dict[str, Any] = {"frameon": False, "fontsize": SMALL_PT, "labelcolor": MUTED, "handlelength": 1.0}
    how |= {"loc": f"outside {where} left", "ncols": 4}
    figure.legend(list(each_once.values()), list(each_once), **how)


def note_missing(figure: Figure, results: Results, *, of_pipelines: bool = False) -> None:
    """Below the axes, what is not in them, and why."""
    missing = [row for row in unmeasured(results) if row.is_pipeline or not of_pipelines]
    if missing:
        named = "; ".join(f"{label(row, results, ', ')} ({row.status})" for row in missing)
        lines = textwrap.wrap(f"Not measured: {named}", NOTE_WIDTH, max_lines=4, placeholder=" …")
        figure.set_figheight(figure.get_figheight() + 0.17 * len(lines))
        text = "\n".join(lines)
        figure.supxlabel(text, x=0.015, ha="left", fontsize=SMALL_PT, color=MUTED, linespacing=1.35)


# ------------------------------------------------------------------------------------------- of a comparison


def throughput(results: Results) -> Figure | None:
    """Samples per second, with the lowest and the highest repetition as whiskers."""
    known = [(row, value) for row in results.measured if (value := row.samples_per_second) is not None]
    if not known:
        return None
    bars = Bars([row for row, _ in known], results)
    repeated = any(row.num_repetitions > 1 for row in bars.rows)
    with drawing():
        figure, (panel,) = figure_of([bars.height])
        spreads = [row.samples_per_second_spread or (value, value) for row, value in known]
        bars.draw(panel, [value for _, value in known], spreads)
        panel.set_title("Throughput")
        panel.set_xlabel("samples per second" + ("; whiskers: repetitions" if repeated else ""))
        note_missing(figure, results)
    return figure


def memory(results: Results) -> Figure | None:
    """Peak memory of the rank that took most, and its model states, with the estimates as marks on them."""
    peaks = [(row, size) for row in results.measured if (size := row.peak_memory_bytes) is not None]
    states = [(row, size) for row in results.measured if (size := row.model_state_bytes) is not None]
    each = [known for known in (peaks, states) if known]
    if not each:
        return None
    all_bars = [Bars([row for row, _ in known], results) for known in each]
    with drawing():
        figure, panels = figure_of([bars.height for bars in all_bars])
        for panel, bars, known in zip(panels, all_bars, each, strict=True):
            estimates = [row.estimated_model_state_bytes if known is states else None for row in bars.rows]
            unit, size = byte_unit([*(value for _, value in known), *estimates])
            values = [value / size for _, value in known]
            marks = [
                value if mark is None else mark / size for value, mark in zip(values, estimates, strict=True)
            ]
            bars.draw(panel, values)
            for at, mark in zip(bars.places, marks if any(estimates) else (), strict=False):
                panel.plot([mark] * 2, [at - 0.43, at + 0.43], color=INK, solid_capstyle="butt")
            panel.set_xlim(0, ROOM * max(*values, *marks) or 1)
            if known is states:
                panel.set_title("Model states of a rank")
                panel.set_xlabel(unit + ("; the upright line is the estimate" if any(estimates) else ""))
            else:
                panel.set_title("Peak memory of a rank")
                panel.set_xlabel(
                    f"{unit} of {'resident' if results.accelerator == 'cpu' else 'device'} memory"
                )
        note_missing(figure, results)
    return figure


def parts(results: Results) -> Figure | None:
    """Where the time of each row's steps goes: as long as its median step, divided as torch's profiler saw it."""
    rows = [row for row in results.measured if row.parts]
    if not rows:
        return None
    bars, (name, unit) = Bars(rows, results), step_unit(results)
    lengths, shares = (
        [(row.median_step_seconds or 0) / unit for row in rows],
        [row.parts or {} for row in rows],
    )
    there = [part for part in PARTS if any(each.get(part, 0) >= LEAST_SHARE for each in shares)]
    with drawing():
        figure, (panel,) = figure_of([bars.height + 0.5])
        for at, length, each in zip(bars.places, lengths, shares, strict=True):
            end = _stack(panel, at, [(part, each.get(part, 0.0) * length, "") for part in there])
            _beside(panel, end, at, number(length, 3))
        bars.name(panel)
        panel.set_xlim(0, ROOM * max(lengths))
        panel.set_title("A step taken apart")
        panel.set_xlabel(f"{name} of a median step")
        note_missing(figure, results)
        _legend(figure, panel, "upper")
    return figure


def loss(results: Results) -> Figure | None:
    """The loss against seconds of training, and when each row comes to the loss that all of them reach."""
    rows, target = [row for row in results.measured if row.loss_curve], results.target_loss
    if target is None:
        return None
    bars, most = Bars(rows, results), max(row.slots for row in rows)
    with drawing():
        figure, (curves, times) = figure_of([2.1, bars.height])
        for at, row in zip(bars.places, rows, strict=True):
            times_s, losses = zip(*row.loss_curve, strict=True)
            style: Any = "-" if row.slots == most else (0, (4, 2))
            colour, seconds = bars.colours[row.name], row.seconds_to(target)
            curves.plot(times_s, losses, color=colour, linestyle=style)
            if seconds is None:
                _beside(times, 0, at, "not reached", MUTED)
                continue
            curves.plot(seconds, target, "o", color=colour, **DOT)
            times.barh(at, seconds, 0.12, color=colour)
            times.plot(seconds, at, "o", color=colour, **DOT)
            _beside(times, seconds, at, f"{number(seconds, 3)} s", gap=8)
        curves.axhline(target, **DOTTED)
        curves.set_title(f"Loss; the dots are at {number(target)}")
        window = max(row.window for row in rows)
        curves.set_ylabel(f"loss, mean of {window} steps" if window > 1 else "loss")
        if any(row.slots < most for row in rows):
            curves.set_xlabel(f"dashed: on fewer than {count(most, 'slot')}")
        curves.grid(axis="y")
        bars.name(times)
        times.set_title(f"Time to a loss of {number(target)}")
        times.set_xlabel("seconds of training")
        for panel in (curves, times):
            panel.set_xlim(0, max(row.loss_curve[-1][0] for row in rows) * 1.16)
            panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
        note_missing(figure, results)
    return figure


# ------------------------------------------------------------------------------------------- of a run


def profile_picture(profile: Mapping[str, Any]) -> Figure | None:
    """A bar a rank, made of the parts of its mean step; None where no step was recorded.

    Args:
        profile: Of ``profile.json``.
    """
    ranks = [rank for rank in profile["ranks"] if rank["step_s"]]
    if not ranks:
        return None
    if len(ranks) > MOST_RANKS:  # those with the longest and the shortest steps
        by_length = sorted(ranks, key=lambda rank: rank["step_s"])
        kept = [*by_length[: MOST_RANKS // 2], *by_length[-MOST_RANKS // 2 :]]
        ranks = sorted(kept, key=lambda rank: rank["rank"])
    there = [part for part in PARTS if any(rank["seconds"].get(part) for rank in ranks)]
    roomy = 1000 * ROOMY * max(rank["step_s"] for rank in ranks)
    with drawing():
        figure, (panel,) = figure_of([max(0.6, ROW_IN * len(ranks)) + 0.45])
        for at, rank in enumerate(ranks):
            seconds = [(part, rank["seconds"].get(part, 0.0)) for part in there]
            _stack(
                panel, at, [(p, 1000 * each, percent(each / rank["step_s"])) for p, each in seconds], roomy
            )
        panel.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks], color=INK)
        panel.set_ylim(len(ranks) - 0.4, -0.6)
        panel.set_xlabel("milliseconds of a mean step")
        left_out = len(profile["ranks"]) - len(ranks)
        panel.set_title("A step taken apart" + (f" ({left_out} ranks are left out)" if left_out else ""))
        _legend(figure, panel, "lower")
    return figure


# Of a comparison: the stem of its file -> what draws it, and what to see in it.
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
