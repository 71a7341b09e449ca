"""Schedules of pipelines drawn as they run: a row a rank, a box a pass.

A kind of pass has one colour, the parts of a rank are its shades, and the number is the micro-batch's. The kinds differ
in brightness as well: forward passes are light, backward passes darker, those for the weights darkest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, SCHEDULES, WEIGHT, Pipeline
from determined_ds.pipe.recording import LOAD, RecordedStep
from determined_ds.pipe.timeline import Span, bubble, counted_bubble, timeline
from determined_ds.report.columns import label
from determined_ds.report.numbers import number, percent, printable
from determined_ds.report.results import Results
from determined_ds.report.style import (
    GROUND,
    INK,
    MUTED,
    PALETTE,
    SMALL_PT,
    drawing,
    figure_of,
    ink_on,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE_IN = 10.0
ROWS_IN = 0.24, 6.0  # of a rank, and at most of all of them
BOX = 0.86  # of a row
DIGIT_IN = 0.056  # of a number in a box
NUMBER_PT = 6.5
# Kind of pass -> its colour for the first and the last part of a rank, and what it is called. As in steps taken apart.
KINDS = {
    FORWARD: (PALETTE[1], "#fbe3b0", "forward"),
    BACKWARD: ("#00664a", "#35b890", "backward"),
    INPUT: ("#00664a", "#35b890", "backward of the inputs"),
    WEIGHT: (PALETTE[8], "#5f53b3", "backward of the weights"),
    LOAD: (MUTED, MUTED, "loading"),
}
MOST = 6  # pipelines of a comparison; of more the first
# What to see in a picture of measured steps.
CAPTION = (
    "The median step of each pipeline, a row a rank, with the micro-batch's number where there is room. Above, its"
    " passes as the schedule plans them, as long as they were; below, as they ran. Where the planned bubble is larger"
    " than the counted one, parts are uneven; where the measured one is larger than the planned one, ranks wait for"
    " messages, or passes vary, as they do where ranks share the cores of a CPU."
)
ORDER = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")


# A title, a schedule, and the passes of each rank.
Panel = tuple[str, Pipeline, Sequence[Sequence[Span]]]


def schedules(results: Results) -> Figure | None:
    """Each measured pipeline's median step: above as its schedule plans it, below as it was.

    None where no step of a pipeline was recorded.
    """
    recorded = []
    for row in results.measured:
        steps = [each.pipeline_step for each in row.repetitions if each.pipeline_step is not None]
        recorded += [(row, step) for step in steps[:1]]
    if not recorded:
        return None
    panels = [panel for row, step in recorded[:MOST] for panel in _panels(label(row, results, ", "), step)]
    left_out = f"; {len(recorded) - MOST} more pipelines are left out" if len(recorded) > MOST else ""
    return _picture(panels, unit=0.001, axis=f"milliseconds{left_out}")


def step_picture(step: RecordedStep) -> Figure:
    """One recorded step, as its schedule plans it and as it was."""
    return _picture(_panels(_described(step.pipeline), step), unit=0.001, axis="milliseconds")


def planned_picture(ranks: int, micro_batches: int, chunks: int = 2) -> tuple[Figure, list[str]]:
    """Every schedule of a pipeline as it is planned, where a backward pass takes twice as long as a forward one.

    Args:
        ranks: Of the pipeline.
        micro_batches: Of a step.
        chunks: Parts of the model that each rank holds under ``interleaved``.

    Returns:
        The picture, and why others are not in it.
    """
    panels, problems = [], []
    for name in sorted(SCHEDULES, key=ORDER.index):
        parts = {"dualpipev": 2, "interleaved": chunks}.get(name, 1)
        pipe = Pipeline(schedule=name, ranks=ranks, micro_batches=micro_batches, chunks=parts)
        if problem := pipe.problem():
            problems.append(problem)
            continue
        spans = timeline(pipe)
        scaled = [[replace(s, start=s.start / parts, end=s.end / parts) for s in rank] for rank in spans]
        panels.append((f"{_described(pipe)}: bubble {percent(bubble(spans))}", pipe, scaled))
    return _picture(panels, unit=1.0, axis="forward passes through a rank"), problems


def _described(pipe: Pipeline) -> str:
    chunks = f", {pipe.chunks} chunks a rank" if pipe.chunks > 1 else ""
    return f"{pipe.schedule}, {pipe.micro_batches} micro-batches{chunks}"


def _panels(name: str, step: RecordedStep) -> list[Panel]:
    """A step as it was planned, and as it was."""
    planned = step.planned()
    plan = f"{printable(name)}, planned: bubble {percent(bubble(planned))} with these passes"
    plan += f", {percent(counted_bubble(step.pipeline))} by counting"
    found = f"measured: bubble {percent(step.bubble)} of {number(1000 * step.seconds, 3)} ms"
    return [(plan, step.pipeline, planned), (found, step.pipeline, step.spans)]


def _picture(panels: Sequence[Panel], *, unit: float, axis: str) -> Figure:
    """Panels one below the other, on one scale of this unit."""
    from matplotlib.patches import Patch

    longest = max(span.end for _, _, ranks in panels for rank in ranks for span in rank) / unit
    with drawing():
        heights = [min(ROWS_IN[1], ROWS_IN[0] * pipe.ranks) for _, pipe, _ in panels]
        figure, axes = figure_of(heights, width=WIDE_IN)
        for each, (title, pipe, ranks) in zip(axes, panels, strict=True):
            _draw_rows(each, pipe, ranks, unit, (WIDE_IN - 0.8) / longest)
            each.set_xlim(0, longest)
            each.set_title(title)
            each.tick_params(axis="x", length=3)
            each.spines["left"].set_visible(False)
        axes[-1].set_xlabel(axis)
        there = {span.op.kind for _, _, ranks in panels for rank in ranks for span in rank}
        keys = [Patch(facecolor=KINDS[kind][0], label=KINDS[kind][2]) for kind in KINDS if kind in there]
        if (chunks := max(pipe.chunks for _, pipe, _ in panels)) > 1:
            paler = f"paler: later of a rank's {chunks} parts"
            keys.append(Patch(facecolor=_shade(FORWARD, 1.0), label=paler))
        how: dict[str, Any] = {"ncols": 6, "frameon": False, "fontsize": SMALL_PT, "labelcolor": MUTED}
        figure.legend(handles=keys, loc="outside upper left", handlelength=1.0, **how)
    return figure


def _draw_rows(axes: Axes, pipe: Pipeline, ranks: Sequence[Sequence[Span]], unit: float, inch: float) -> None:
    """A rank's boxes, by kind and part, and numbers in those that are wide enough; ``inch`` in units of the axis."""
    is_roomy = ROWS_IN[0] * pipe.ranks <= ROWS_IN[1]
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
                axes.text(start + width / 2, rank, text, color=ink_on(colour), zorder=3, **how)
        for colour, found in boxes.items():
            thinnest = min(width for _, width in found) * inch
            edge: dict[str, Any] = {"edgecolor": GROUND, "linewidth": 0.5} if thinnest > 0.03 else {}
            axes.broken_barh(found, (rank - BOX / 2, BOX), facecolor=colour, **edge)
    names = range(0, pipe.ranks, 1 if is_roomy else max(1, pipe.ranks // 16))
    axes.set_yticks(names, [f"rank {rank}" for rank in names], color=INK)
    axes.set_ylim(pipe.ranks - 0.5, -0.5)


def _shade(kind: str, share: float) -> str:
    """The colour of a kind of pass: from that of a rank's first part, 0, to the paler one of its last, 1."""
    first, last, _ = KINDS[kind]
    ends = ((int(first[at : at + 2], 16), int(last[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in ends)
