"""Schedules as pictures: each pass where it ran, in the colour of its kind."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, SCHEDULES, WEIGHT, Pipeline
from determined_ds.pipe.timeline import bubble, timeline
from determined_ds.report.formatting import percent
from determined_ds.report.gantt import (
    COLOURS,
    all_schedules,
    planned_picture,
    schedules_picture,
    shade,
    step_picture,
)
from determined_ds.report.rank_bars import ink_on
from determined_ds.report.style import drawing, png_of
from tests.report.making import OF_TWO, comparison, recorded, repetition, results, row


def boxes(panel: Axes) -> list[tuple[float, float, float]]:
    """Start, end and row of each."""
    found = []
    for collection in panel.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            found.append((round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2)))
    return sorted(found)


def numbers(panel: Axes) -> list[str]:
    return [text.get_text() for text in panel.texts]


@pytest.mark.parametrize("pipe", all_schedules(4, 8, chunks=4), ids=lambda pipe: pipe.schedule)
def test_each_pass_is_a_box_on_the_row_of_its_rank(pipe: Pipeline) -> None:
    """A chunk's forward pass takes as much less of a rank's."""
    (panel,) = planned_picture([pipe]).axes
    expected = [
        (round(span.start / pipe.chunks, 6), round(span.end / pipe.chunks, 6), rank)
        for rank, spans in enumerate(timeline(pipe))
        for span in spans
    ]
    assert boxes(panel) == sorted(expected)
    assert percent(bubble(timeline(pipe))) in panel.get_title(loc="left")
    assert panel.get_title(loc="left").startswith(pipe.schedule)


def test_all_schedules_are_drawn_on_one_scale() -> None:
    figure = planned_picture(all_schedules(4, 8))
    assert {panel.get_title(loc="left").partition(",")[0] for panel in figure.axes} == set(SCHEDULES)
    assert len({panel.get_xlim() for panel in figure.axes}) == 1


def test_numbers_are_those_of_micro_batches_where_they_fit() -> None:
    (panel,) = planned_picture([Pipeline(schedule="1f1b", ranks=2, micro_batches=4)]).axes
    assert numbers(panel) == ["0", "1", "0", "2", "1", "3", "2", "3", "0", "0", "1", "1", "2", "2", "3", "3"]
    (crowded,) = planned_picture([Pipeline(schedule="gpipe", ranks=2, micro_batches=200)]).axes
    assert numbers(crowded) == []


def test_a_measured_step_stands_below_its_plan() -> None:
    """Which has passes as long as they were, and no time lost between them."""
    step = recorded(OF_TWO)
    planned, measured = step_picture(step).axes
    assert boxes(measured) == sorted(
        (round(1000 * span.start, 6), round(1000 * span.end, 6), rank)
        for rank, spans in enumerate(step.spans)
        for span in spans
    )
    assert len(boxes(planned)) == len(boxes(measured)) == 2 * 2 * 8
    assert planned.get_xlim() == measured.get_xlim()
    assert "11.1 % by counting" in planned.get_title(loc="left")
    assert f"measured: bubble {percent(step.bubble)}" in measured.get_title(loc="left")


def test_a_comparison_shows_each_pipeline_that_was_recorded() -> None:
    figure = schedules_picture(comparison())
    assert figure is not None
    planned, _ = figure.axes
    assert planned.get_title(loc="left").startswith("pipeline, 2 slots, planned: bubble ")
    assert "pipeline, 1 slot (cannot run)" in " ".join(text.get_text() for text in figure.findobj(Text))
    assert schedules_picture(results(row("zero1", repetition()))) is None


def test_of_many_pipelines_the_fastest_are_drawn() -> None:
    """A tuning tries dozens."""
    rows = [
        row(f"p{at}", repetition([1.0 + at], pipeline_step=recorded(OF_TWO)))
        for at in (*range(4, 9), *range(4))
    ]
    figure = schedules_picture(results(*rows))
    assert figure is not None
    titles = [panel.get_title(loc="left") for panel in figure.axes[::2]]
    assert [title.partition(",")[0] for title in titles] == ["p4", "p5", "p0", "p1", "p2", "p3"]
    assert "3 slower pipelines are left out" in figure.axes[-1].get_xlabel()


def test_kinds_differ_in_brightness_whatever_the_part() -> None:
    """So that they differ in print, and to those who see other colours."""

    def brightness(colour: str) -> float:
        red, green, blue = to_rgb(colour)
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    def of(kind: str) -> list[float]:
        return [brightness(shade(kind, chunk, 4)) for chunk in range(4)]

    assert min(of(FORWARD)) > max(of(BACKWARD)) > min(of(BACKWARD)) > brightness(shade(WEIGHT, 0, 1))
    assert of(BACKWARD) == of(INPUT)
    assert sorted(of(FORWARD)) == of(FORWARD)


def test_a_number_can_be_read_on_its_box() -> None:
    """WCAG 2 asks for a contrast of 4.5 of text, of 3 of large text."""

    def luminance(colour: str) -> float:
        parts = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for kind in COLOURS:
        for chunk in range(4):
            colour = shade(kind, chunk, 4)
            light, dark = sorted((luminance(colour), luminance(ink_on(colour))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) > 3.5, (kind, chunk)


@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), [(1, 1, 1), (2, 8, 4), (64, 128, 2)])
def test_small_and_large_ones_are_drawn_whole(ranks: int, micro_batches: int, chunks: int) -> None:
    pipes = [
        Pipeline(schedule="1f1b", ranks=ranks, micro_batches=micro_batches),
        Pipeline(schedule="interleaved", ranks=ranks, micro_batches=micro_batches, chunks=chunks),
    ]
    figure = planned_picture(pipes)
    assert figure.get_figheight() < 16
    assert png_of(figure)[:4] == b"\x89PNG"
    with drawing():
        figure.draw_without_rendering()
    for panel in figure.axes:
        assert panel._left_title.get_window_extent().x1 < figure.get_figwidth() * figure.dpi
