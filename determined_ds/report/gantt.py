"""Schedules of pipelines drawn as they run: a row a rank, a box a pass.

A kind of pass has one colour, the parts of a rank are its shades, and the number is the micro-batch's. The kinds differ
in brightness as well: forward passes are light, backward passes darker, those for the weights darkest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, SCHEDULES, WEIGHT, Pipeline
from determined_ds.pipe.recording import LOAD, RecordedStep
from determined_ds.pipe.timeline import Span, bubble, counted_bubble, timeline
from determined_ds.report.bars import note_missing
from determined_ds.report.formatting import label, number, percent
from determined_ds.report.rank_bars import ink_on
from determined_ds.report.results import Results, Row
from determined_ds.report.style import GRID, GROUND, INK, MUTED, PALETTE, SMALL_PT, drawing, figure_of
from determined_ds.report.texts import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_IN = 10.0
ROWS_IN = 0.24, 6.0  # of a rank, and at most of all of them
BOX = 0.86  # of a row
DIGIT_IN = 0.056  # of a number in a box
NUMBER_PT = 6.5
# Kind of pass -> its colour for the first and the last part of a rank, and what it is called. As in steps taken apart.
COLOURS = {
    FORWARD: (PALETTE[1], "#fbe3b0"),
    BACKWARD: ("#00664a", "#35b890"),
    INPUT: ("#00664a", "#35b890"),
    WEIGHT: (PALETTE[8], "#5f53b3"),
    LOAD: (MUTED, MUTED),
}
NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "backward of the inputs",
    WEIGHT: "backward of the weights",
    LOAD: "loading",
}
LONGEST_NAME = 40
MOST = 6  # pipelines of a comparison; of more the fastest


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows of one panel.

    Args:
        title: Of the panel.
        pipe: The schedule.
        spans: Of each rank.
    """

    title: str
    pipe: Pipeline
    spans: Sequence[Sequence[Span]]


def schedules_picture(results: Results) -> Figure | None:
    """Each measured pipeline's median step: above as its schedule plans it, below as it was.

    None where no step of a pipeline was recorded; the fastest six where there are more.
    """
    recorded = [(row, step) for row in results.measured if (step := step_of(row)) is not None]
    if not recorded:
        return None
    fastest = sorted(row.median_step_seconds or 0 for row, _ in recorded)[:MOST][-1]
    shown = [(row, step) for row, step in recorded if (row.median_step_seconds or 0) <= fastest]
    charts = [
        chart for row, step in shown for chart in _charts(label(row, results, ", ", LONGEST_NAME), step)
    ]
    figure = gantt_picture(charts, in_seconds=True)
    with drawing():
        if len(shown) < len(recorded):
            figure.axes[-1].set_xlabel(
                f"milliseconds; {len(recorded) - len(shown)} slower pipelines are left out"
            )
        note_missing(figure, results, of_pipelines=True)
    return figure


def step_of(row: Row) -> RecordedStep | None:
    """The step of a row that is drawn; None where none was recorded."""
    return next((each.pipeline_step for each in row.repetitions if each.pipeline_step is not None), None)


def step_picture(step: RecordedStep) -> Figure:
    """One recorded step, as its schedule plans it and as it was."""
    return gantt_picture(_charts(described(step.pipeline), step), in_seconds=True)


def planned_picture(pipelines: Sequence[Pipeline]) -> Figure:
    """Schedules as they are planned, where a backward pass takes twice as long as a forward one, half for the weights.

    Args:
        pipelines: Each of which has an order; with several chunks a pass of a part takes as much less.
    """
    charts = []
    for pipe in pipelines:
        spans = timeline(pipe)
        scaled = [[_scaled(span, 1 / pipe.chunks) for span in rank] for rank in spans]
        title = f"{described(pipe)}: bubble {percent(bubble(spans))}"
        charts.append(Chart(title=title, pipe=pipe, spans=scaled))
    return gantt_picture(charts, in_seconds=False)


def described(pipe: Pipeline) -> str:
    """A schedule with its numbers, in words."""
    chunks = f", {pipe.chunks} chunks a rank" if pipe.chunks > 1 else ""
    return f"{pipe.schedule}, {pipe.micro_batches} micro-batches{chunks}"


def gantt_picture(charts: Sequence[Chart], *, in_seconds: bool) -> Figure:
    """Panels one below the other, on one scale.

    Args:
        charts: One a panel.
        in_seconds: Whether times are seconds; else a forward pass through a rank takes one.
    """
    unit = 0.001 if in_seconds else 1.0
    longest = max(span.end for chart in charts for rank in chart.spans for span in rank) / unit
    heights = [min(ROWS_IN[1], ROWS_IN[0] * chart.pipe.ranks) for chart in charts]
    with drawing("schedules"):
        figure, panels = figure_of(heights, width=WIDE_IN)
        inch = (WIDE_IN - 0.8) / longest
        for panel, chart in zip(panels, charts, strict=True):
            _rows(panel, chart, unit, inch)
            panel.set_xlim(0, longest)
            panel.set_title(chart.title)
            panel.tick_params(axis="x", length=3)
            panel.spines["left"].set_visible(False)
        panels[-1].set_xlabel("milliseconds" if in_seconds else "forward passes through a rank")
        _legend(figure, charts)
    return figure


def _charts(name: str, step: RecordedStep) -> list[Chart]:
    planned = step.planned()
    clocks = f"; clocks of {step.machines} machines aligned by their messages" if step.machines > 1 else ""
    return [
        Chart(
            title=f"{printable(name)}, planned: bubble {percent(bubble(planned))} with these passes,"
            f" {percent(counted_bubble(step.pipeline))} by counting",
            pipe=step.pipeline,
            spans=planned,
        ),
        Chart(
            title=f"measured: bubble {percent(step.bubble)} of {number(1000 * step.seconds, 3)} ms{clocks}",
            pipe=step.pipeline,
            spans=step.spans,
        ),
    ]


def _scaled(span: Span, by: float) -> Span:
    return Span(op=span.op, start=span.start * by, end=span.end * by)


def _rows(panel: Axes, chart: Chart, unit: float, inch: float) -> None:
    """A rank's boxes, by kind and part, and numbers in those that are wide enough.

    Args:
        panel: Where to.
        chart: What.
        unit: Of the axis.
        inch: Of the axis, in its units.
    """
    is_roomy = ROWS_IN[0] * chart.pipe.ranks <= ROWS_IN[1]
    for rank, spans in enumerate(chart.spans):
        boxes: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for span in spans:
            box = span.start / unit, (span.end - span.start) / unit
            boxes.setdefault((span.op.kind, _chunk(chart.pipe, rank, span)), []).append(box)
        for (kind, chunk), found in boxes.items():
            colour = shade(kind, chunk, chart.pipe.chunks)
            thinnest = min(width for _, width in found) * inch
            edge: dict[str, Any] = {"edgecolor": GROUND, "linewidth": 0.5} if thinnest > 0.03 else {}
            panel.broken_barh(found, (rank - BOX / 2, BOX), facecolor=colour, **edge)
        for span in spans:
            text, width = str(span.op.micro_batch), (span.end - span.start) / unit * inch
            if is_roomy and span.op.kind != LOAD and width > DIGIT_IN * (len(text) + 0.4):
                ink = ink_on(shade(span.op.kind, _chunk(chart.pipe, rank, span), chart.pipe.chunks))
                middle = (span.start + span.end) / 2 / unit
                panel.text(
                    middle, rank, text, color=ink, fontsize=NUMBER_PT, ha="center", va="center_baseline"
                )
    every = 1 if is_roomy else max(1, chart.pipe.ranks // 16)
    names = range(0, chart.pipe.ranks, every)
    panel.set_yticks(names, [f"rank {rank}" for rank in names], color=INK)
    panel.set_ylim(chart.pipe.ranks - 0.5, -0.5)


def _chunk(pipe: Pipeline, rank: int, span: Span) -> int:
    """Which of a rank's parts it is, from 0."""
    own = [part for part in range(pipe.parts) if pipe.rank_of(part) == rank]
    return own.index(span.op.part) if span.op.part in own else 0


def shade(kind: str, chunk: int, chunks: int) -> str:
    """The colour of a kind of pass for one of a rank's parts, which grow paler."""
    first, last = (_rgb(colour) for colour in COLOURS.get(kind, (GRID, GRID)))
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    mixed = (round(a + share * (b - a)) for a, b in zip(first, last, strict=True))
    return "#" + "".join(f"{each:02x}" for each in mixed)


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return red, green, blue


def _legend(figure: Figure, charts: Sequence[Chart]) -> None:
    from matplotlib.patches import Patch

    there: Mapping[str, None] = dict.fromkeys(
        span.op.kind for chart in charts for rank in chart.spans for span in rank
    )
    chunks = max(chart.pipe.chunks for chart in charts)
    keys = []
    names = (
        NAMES
        if BACKWARD not in there
        else {**NAMES, BACKWARD: "backward (of the inputs, where in two)", INPUT: ""}
    )
    if INPUT not in there:
        names = NAMES
    for kind in (kind for kind, name in names.items() if kind in there and name):
        keys.append(Patch(facecolor=shade(kind, 0, 1), label=names[kind]))
    more = [f"paler: later of a rank's {chunks} parts"] if chunks > 1 else []
    keys += [Patch(facecolor=shade(FORWARD, 1, 2), label=text) for text in more]
    how: dict[str, Any] = {"ncols": 6, "frameon": False, "fontsize": SMALL_PT, "labelcolor": MUTED}
    figure.legend(handles=keys, loc="outside upper left", handlelength=1.0, **how)


def all_schedules(ranks: int, micro_batches: int, chunks: int = 2) -> list[Pipeline]:
    """Every schedule of a pipeline, for a picture of them; ``chunks`` of ``interleaved``."""
    of = {"dualpipev": 2, "interleaved": chunks}
    return [
        Pipeline(schedule=name, ranks=ranks, micro_batches=micro_batches, chunks=of.get(name, 1))
        for name in sorted(SCHEDULES, key=("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev").index)
    ]
