"""Results, profiles and schedules as pictures.

Bars begin at zero, are named where they stand, and carry their number; a strategy has one colour in all pictures, and
so has a part of a step. A schedule is drawn as it runs: a row a rank, a box a pass, with the micro-batch's number. A
kind of pass has one colour, and the parts of a rank are its shades; forward passes are light, backward passes darker,
those for the weights darkest.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, WEIGHT, Pipeline
from determined_ds.pipe.timeline import LOAD, RecordedStep, Span, bubble, counted_bubble
from determined_ds.report import style
from determined_ds.report.comparison import PEAK, STATES, label
from determined_ds.report.numbers import byte_unit, count, number, percent, printable
from determined_ds.report.results import PARTS, WINDOW, Results, Row
from determined_ds.report.style import PALETTE, PART_COLOURS, drawing, figure_of, ink_on, strategy_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_WIDTH = 20  # characters of a line
ROW_IN, LINE_IN = 0.27, 0.15  # of a bar and the space around it; of a line of its name
ROOM = 1.22  # of an axis beside its longest bar, for the number
DOT: dict[str, Any] = {"marker": "o", "markeredgecolor": style.GROUND, "markersize": 7, "zorder": 4}
TICKS: dict[str, Any] = {"axis": "x", "nbins": 6, "steps": [1, 2, 5, 10]}
LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": style.SMALL_PT,
    "labelcolor": style.MUTED,
    "handlelength": 1.0,
}
MOST_RANKS = 32  # bars; of more ranks, those with the longest and the shortest steps
ROOMY = 0.09  # share of the longest bar in which a number fits
# Of schedules.
WIDE_IN = 10.0
ROW_OF_RANK_IN, ROWS_IN = 0.24, 6.0  # the latter of all ranks at most
BOX = 0.86  # of a row
DIGIT_IN = 0.056  # of a number in a box
NUMBER_PT = 6.5
# Kind of pass -> its colour for the first and the last part of a rank, and what it is called. As in steps taken apart.
KINDS = {
    FORWARD: (PALETTE[1], "#fbe3b0", "forward"),
    BACKWARD: ("#00664a", "#35b890", "backward"),
    INPUT: ("#00664a", "#35b890", "backward of the inputs"),
    WEIGHT: (PALETTE[8], "#5f53b3", "backward of the weights"),
    LOAD: (style.MUTED, style.MUTED, "loading"),
}
MOST = 6  # pipelines of a comparison; of more the first


def _names(results: Results, rows: Sequence[Row]) -> tuple[list[str], float]:
    """The rows' names at the left of their bars, and how high the bars are in inches."""
    labels = [label(row, results, ", ") for row in rows]
    names = ["\n".join(textwrap.wrap(each, LABEL_WIDTH, break_on_hyphens=False)) or each for each in labels]
    lines = max(name.count("\n") + 1 for name in names)
    return names, max(0.6, max(ROW_IN, 0.05 + LINE_IN * lines) * len(rows))


def _name_bars(panel: Axes, names: Sequence[str]) -> None:
    """Write the names at the left, the first on top."""
    size = style.SMALL_PT if any("\n" in name for name in names) else style.FONT_PT
    panel.set_yticks(range(len(names)), names, color=style.INK, fontsize=size, linespacing=1.05)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.locator_params(**TICKS)
    panel.tick_params(axis="x", length=3)


def _beside(panel: Axes, value: float, at: float, text: str, colour: str = style.INK, gap: float = 5) -> None:
    """A text right of where a bar ends."""
    how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": style.SMALL_PT}
    panel.annotate(text, (value, at), xytext=(gap, 0), color=colour, **how)


# ------------------------------------------------------------------------------------------- of a comparison


def throughput(results: Results) -> Figure | None:
    """Samples per second, with the lowest and the highest repetition as whiskers."""
    rows = [row for row in results.measured if row.samples_per_second is not None]
    repeated = "; whiskers: repetitions" if any(len(row.repetitions) > 1 for row in rows) else ""
    values = [row.samples_per_second or 0.0 for row in rows]
    spreads = [row.samples_per_second_spread or (0.0, 0.0) for row in rows]
    return _bars(results, [("Throughput", f"samples per second{repeated}", rows, values, spreads)])


def memory(results: Results) -> Figure | None:
    """Peak memory of the rank that took most, and its model states."""
    kind, panels = "resident" if results.accelerator == "cpu" else "device", []
    for title, of, words in (("Peak memory", PEAK, f" of {kind} memory"), ("Model states", STATES, "")):
        rows = [row for row in results.measured if getattr(row, of) is not None]
        unit, size = byte_unit(getattr(row, of) for row in rows)
        values = [getattr(row, of) / size for row in rows]
        panels.append((f"{title} of a rank", unit + words, rows, values, ()))
    return _bars(results, panels)


# A title, the name of the axis; rows and their values, and whiskers, where there are some.
Bars = tuple[str, str, Sequence[Row], Sequence[float], Sequence[tuple[float, float]]]


def _bars(results: Results, panels: Sequence[Bars]) -> Figure | None:
    """A bar a row, with its number; of the panels that have rows."""
    panels, colours = [each for each in panels if each[2]], strategy_colours(results)
    if not panels:
        return None
    with drawing():
        figure, axes = figure_of([_names(results, rows)[1] for _, _, rows, *_ in panels])
        for panel, (title, axis, rows, values, spreads) in zip(axes, panels, strict=True):
            _name_bars(panel, _names(results, rows)[0])
            ends = list(values)
            panel.barh(range(len(rows)), values, 0.7, color=[colours[row.name] for row in rows])
            for at, (low, high) in enumerate(spreads):
                if low < high:
                    error = [[max(0, values[at] - low)], [max(0, high - values[at])]]
                    panel.errorbar(values[at], at, xerr=error, color=style.INK, elinewidth=1.2, capsize=3)
                ends[at] = max(values[at], high)
            for at, end in enumerate(ends):
                _beside(panel, end, at, number(values[at], 3))
            panel.set_xlim(0, ROOM * max(ends) or 1)
            panel.set_title(title)
            panel.set_xlabel(axis)
    return figure


def loss(results: Results) -> Figure | None:
    """The loss against seconds of training, and when each row comes to the loss that all of them reach."""
    rows, target = [row for row in results.measured if row.loss_curve], results.target_loss
    if target is None:
        return None
    colours, most = strategy_colours(results), max(row.slots for row in rows)
    names, height = _names(results, rows)
    with drawing():
        figure, (curves, times) = figure_of([2.1, height])
        for at, row in enumerate(rows):
            dashes: Any = "-" if row.slots == most else (0, (4, 2))
            colour, seconds = colours[row.name], row.seconds_to(target)
            curves.plot(*zip(*row.loss_curve, strict=True), color=colour, linestyle=dashes)
            if seconds is None:
                _beside(times, 0, at, "not reached", style.MUTED)
                continue
            curves.plot(seconds, target, color=colour, **DOT)
            times.barh(at, seconds, 0.12, color=colour)
            times.plot(seconds, at, color=colour, **DOT)
            _beside(times, seconds, at, f"{number(seconds, 3)} s", gap=8)
        curves.axhline(target, color=style.MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        curves.set_title(f"Loss; the dots are at {number(target)}")
        curves.set_ylabel(f"loss, mean of {WINDOW} steps")
        if any(row.slots < most for row in rows):
            curves.set_xlabel(f"dashed: on fewer than {count(most, 'slot')}")
        curves.grid(axis="y")
        _name_bars(times, names)
        times.set_title(f"Time to a loss of {number(target)}")
        times.set_xlabel("seconds of training")
        for panel in (curves, times):
            panel.set_xlim(0, max(row.loss_curve[-1][0] for row in rows) * 1.16)
            panel.locator_params(**TICKS)
    return figure


def schedules(results: Results) -> Figure | None:
    """Each measured pipeline's median step: above as its schedule plans it, below as it was; None without one."""
    recorded = []
    for row in results.measured:
        steps = [each.pipeline_step for each in row.repetitions if each.pipeline_step is not None]
        recorded += [(label(row, results, ", "), step) for step in steps[:1]]
    if not recorded:
        return None
    left_out = f"; {len(recorded) - MOST} more pipelines are left out" if len(recorded) > MOST else ""
    panels = [panel for name, step in recorded[:MOST] for panel in _panels(name, step)]
    return _picture(panels, unit=0.001, axis=f"milliseconds{left_out}")


# Of a comparison. What to see in each is said on its page.
CHARTS: dict[str, Callable[[Results], Figure | None]] = {
    "throughput": throughput,
    "memory": memory,
    "loss": loss,
    "schedules": schedules,
}


# ------------------------------------------------------------------------------------------- of a run


def profile_picture(profile: Mapping[str, Any]) -> Figure | None:
    """A bar a rank, made of the parts of its mean step; None where no step was recorded.

    Args:
        profile: Of ``profile.json``.
    """
    by_length = sorted((rank for rank in profile["ranks"] if rank["step_s"]), key=lambda rank: rank["step_s"])
    if not by_length:
        return None
    longest_s, half = by_length[-1]["step_s"], MOST_RANKS // 2
    kept = by_length if len(by_length) <= MOST_RANKS else [*by_length[:half], *by_length[-half:]]
    ranks = sorted(kept, key=lambda rank: rank["rank"])
    there = [part for part in PARTS if any(rank["seconds"].get(part) for rank in ranks)]
    with drawing():
        figure, (panel,) = figure_of([max(0.6, ROW_IN * len(ranks)) + 0.45])
        for at, rank in enumerate(ranks):
            end = 0.0
            for part in there:
                colour, seconds = PART_COLOURS[part], rank["seconds"].get(part, 0.0)
                panel.barh(at, 1000 * seconds, 0.7, left=end, color=colour, label="" if at else part)
                if seconds > ROOMY * longest_s:
                    how: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": style.SMALL_PT}
                    text = percent(seconds / rank["step_s"])
                    panel.text(end + 500 * seconds, at, text, color=ink_on(colour), **how)
                end += 1000 * seconds
        panel.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks], color=style.INK)
        panel.set_ylim(len(ranks) - 0.4, -0.6)
        panel.set_xlabel("milliseconds of a mean step")
        left_out = len(profile["ranks"]) - len(ranks)
        panel.set_title("A step taken apart" + (f" ({left_out} ranks are left out)" if left_out else ""))
        figure.legend(loc="outside lower left", ncols=4, **LEGEND)
    return figure


# ------------------------------------------------------------------------------------------- of schedules

# A title, a schedule, and the passes of each rank.
Panel = tuple[str, Pipeline, Sequence[Sequence[Span]]]


def step_picture(step: RecordedStep) -> Figure:
    """One recorded step, as its schedule plans it and as it was."""
    return _picture(_panels(_described(step.pipeline), step), unit=0.001, axis="milliseconds")


def _described(pipe: Pipeline) -> str:
    chunks = f", {pipe.chunks} chunks a rank" if pipe.chunks > 1 else ""
    return f"{pipe.schedule}, {pipe.micro_batches} micro-batches{chunks}"


def _panels(name: str, step: RecordedStep) -> list[Panel]:
    """A step as it was planned, and as it was."""
    planned = step.planned()
    plan = f"{printable(name)}, planned: bubble {percent(bubble(planned))} with these passes"
    plan += f", {percent(counted_bubble(step.pipeline))} by counting"
    found = f"measured: bubble {percent(bubble(step.spans))} of {number(1000 * step.seconds, 3)} ms"
    return [(plan, step.pipeline, planned), (found, step.pipeline, step.spans)]


def _picture(panels: Sequence[Panel], *, unit: float, axis: str) -> Figure:
    """Panels one below the other, on one scale of this unit: boxes by kind and part, numbers where there is room."""
    from matplotlib.patches import Patch

    longest = max(span.end for _, _, ranks in panels for rank in ranks for span in rank) / unit
    inch = (WIDE_IN - 0.8) / longest  # of a unit
    with drawing():
        heights = [min(ROWS_IN, ROW_OF_RANK_IN * pipe.ranks) for _, pipe, _ in panels]
        figure, axes = figure_of(heights, width=WIDE_IN)
        for panel, (title, pipe, ranks) in zip(axes, panels, strict=True):
            is_roomy = ROW_OF_RANK_IN * pipe.ranks <= ROWS_IN
            for rank, spans in enumerate(ranks):
                own = [part for part in range(pipe.parts) if pipe.rank_of(part) == rank]
                boxes: dict[str, list[tuple[float, float]]] = {}
                for span in spans:
                    start, width = span.start / unit, (span.end - span.start) / unit
                    chunk = own.index(span.op.part) if span.op.part in own else 0
                    colour = _shade(span.op.kind, chunk / max(1, pipe.chunks - 1))
                    boxes.setdefault(colour, []).append((start, width))
                    text = str(span.op.micro_batch)
                    if is_roomy and span.op.kind != LOAD and width * inch > DIGIT_IN * (len(text) + 0.4):
                        how: dict[str, Any] = {"fontsize": NUMBER_PT, "ha": "center", "va": "center_baseline"}
                        panel.text(start + width / 2, rank, text, color=ink_on(colour), zorder=3, **how)
                for colour, found in boxes.items():
                    thinnest = min(width for _, width in found) * inch
                    edge: dict[str, Any] = (
                        {"edgecolor": style.GROUND, "linewidth": 0.5} if thinnest > 0.03 else {}
                    )
                    panel.broken_barh(found, (rank - BOX / 2, BOX), facecolor=colour, **edge)
            named = range(0, pipe.ranks, 1 if is_roomy else max(1, pipe.ranks // 16))
            panel.set_yticks(named, [f"rank {rank}" for rank in named], color=style.INK)
            panel.set_ylim(pipe.ranks - 0.5, -0.5)
            panel.set_xlim(0, longest)
            panel.set_title(title)
            panel.tick_params(axis="x", length=3)
            panel.spines["left"].set_visible(False)
        axes[-1].set_xlabel(axis)
        there = {span.op.kind for _, _, ranks in panels for rank in ranks for span in rank}
        keys = [Patch(facecolor=KINDS[kind][0], label=KINDS[kind][2]) for kind in KINDS if kind in there]
        if (chunks := max(pipe.chunks for _, pipe, _ in panels)) > 1:
            paler = f"paler: later of a rank's {chunks} parts"
            keys.append(Patch(facecolor=_shade(FORWARD, 1.0), label=paler))
        figure.legend(handles=keys, loc="outside upper left", ncols=6, **LEGEND)
    return figure


def _shade(kind: str, share: float) -> str:
    """The colour of a kind of pass: from that of a rank's first part, 0, to the paler one of its last, 1."""
    first, last, _ = KINDS[kind]
    ends = ((int(first[at : at + 2], 16), int(last[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in ends)
