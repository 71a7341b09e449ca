"""Pictures say what the rows say: checked by what is on their axes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from determined_ds.report.captions import caption
from determined_ds.report.given_rows import results_of_table
from determined_ds.report.pictures import (
    PICTURES,
    Picture,
    bubble_picture,
    final_picture,
    loss_picture,
    memory_picture,
    parts_picture,
    scaling_picture,
    throughput_picture,
)
from determined_ds.report.style import PALETTE, colours, drawing, svg_of
from tests.report.making import (
    MIB,
    OF_TWO,
    PARTS,
    comparison,
    failed,
    recorded,
    repetition,
    results,
    row,
)

OF_PIPELINES = ("bubble", "schedules")
OF_MEASURED = [each for each in PICTURES if each.draw not in (final_picture, parts_picture)]
NAMES = ["zero0, 1 slot", "zero1, 1 slot", "zero0, 2 slots", "zero1, 2 slots", "pipeline, 2 slots"]


def drawn(figure: Figure | None) -> list[Axes]:
    assert figure is not None
    return figure.axes


def widths(panel: Axes) -> list[float]:
    assert all(bar.get_x() == 0 for bar in panel.patches), "a bar does not begin at zero"
    return [bar.get_width() for bar in panel.patches]


def names(panel: Axes) -> list[str]:
    return [each.get_text() for each in panel.get_yticklabels()]


def labels(panel: Axes) -> list[str]:
    return [each.get_text() for each in panel.texts]


def words(figure: Figure | None) -> str:
    assert figure is not None
    return " ".join(each.get_text() for each in figure.findobj(Text)).replace("\n", " ")


def test_throughput() -> None:
    found = comparison()
    (panel,) = drawn(throughput_picture(found))
    assert names(panel) == NAMES
    assert widths(panel) == [each.samples_per_second for each in found.measured]
    assert labels(panel) == ["77.1", "71.9", "145", "131", "112"]
    assert "samples per second" in panel.get_xlabel()
    low, high = panel.get_xlim()
    assert low == 0
    assert high > max(widths(panel))


def test_whiskers_reach_from_the_lowest_to_the_highest_repetition() -> None:
    found = results(row("zero1", repetition([0.2]), repetition([0.25]), repetition([0.4])), row("zero2"))
    (panel,) = drawn(throughput_picture(found))
    ((whisker,),) = (bars.get_segments() for bars in panel.collections)  # zero2 was measured once
    assert whisker[:, 0].tolist() == pytest.approx([32 / 0.4, 32 / 0.2])


def test_memory_beside_its_states_and_their_estimate() -> None:
    peak, states = drawn(memory_picture(comparison()))
    assert widths(peak) == [700, 700, 700, 700, 511]
    assert widths(states) == [12] * 5
    assert [line.get_xdata()[0] for line in states.lines] == [11] * 5
    assert peak.get_xlabel() == "MiB of resident memory"
    (peak, _) = drawn(memory_picture(results(row(), accelerator="cuda")))
    assert peak.get_xlabel() == "MiB of device memory"


def test_an_estimate_beyond_its_bar_is_within_the_picture() -> None:
    found = results(row("zero1", estimated_model_state_bytes=30 * MIB))
    _, states = drawn(memory_picture(found))
    assert states.get_xlim()[1] > 30


def test_loss_and_the_time_to_the_target() -> None:
    found = comparison()
    curves, times = drawn(loss_picture(found))
    target = found.target_loss
    assert target is not None
    lines = {line.get_label(): line for line in curves.lines}
    for each, name in zip(found.measured, NAMES, strict=True):
        line = lines[name.replace(", ", " on ")]
        assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == list(each.loss_curve)
    dots = [line for line in curves.lines if line.get_marker() == "o"]
    assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == [
        (each.seconds_to(target), target) for each in found.measured
    ]
    assert widths(times) == [each.seconds_to(target) for each in found.measured]
    assert curves.get_xlim() == times.get_xlim()


def test_a_row_that_never_comes_to_the_target_says_so() -> None:
    lost = row("lost", repetition(losses=(float("nan"),) * 5))
    _, times = drawn(loss_picture(results(row("good"), lost)))
    assert labels(times) == ["1.00 s", "not reached"]


def test_scaling() -> None:
    found = comparison()
    (panel,) = drawn(scaling_picture(found))
    lines = [line for line in panel.lines if line.get_marker() == "o"]
    assert [line.get_ydata()[-1] for line in lines] == [
        100 * (found.scaling_efficiency(found.rows[at]) or 0) for at in (3, 4)
    ]
    assert sorted(text.split()[0] for text in labels(panel)) == ["zero0", "zero1"]
    assert panel.get_ylim()[0] == 0


def test_labels_at_the_ends_of_lines_lie_apart() -> None:
    rows = [row(f"zero{at}", repetition([0.4 / n]), slots=n) for at in range(5) for n in (1, 2)]
    (panel,) = drawn(scaling_picture(results(*rows)))
    heights = sorted(each.xyann[1] for each in panel.texts if isinstance(each, Annotation))
    apart = [after - before for before, after in itertools.pairwise(heights)]
    assert min(apart) > 4  # of the 0 to 116 % of the axis


def test_a_bubble_beside_its_ideal() -> None:
    (panel,) = drawn(bubble_picture(comparison()))
    assert widths(panel) == pytest.approx([14.1, 100 / 9])
    assert labels(panel) == ["14.1 % measured", "11.1 % ideal"]


def test_pictures_are_drawn_where_they_make_sense() -> None:
    plain = results(row("zero0"), row("zero1"))
    assert scaling_picture(plain) is None
    assert bubble_picture(plain) is None
    bare = repetition(losses=(), peak_memory_bytes_by_rank=(), model_state_bytes_by_rank=())
    untold = results(row("zero0", bare, samples_per_step=None))
    nothing = results(failed("zero3"))
    for picture in PICTURES:
        assert picture.draw(untold) is None, picture.name
        assert picture.draw(nothing) is None, picture.name


@pytest.mark.parametrize("picture", OF_MEASURED, ids=lambda each: each.name)
def test_what_was_not_measured_is_named_below(picture: Picture) -> None:
    text = words(picture.draw(comparison()))
    assert "pipeline, 1 slot (cannot run)" in text
    assert "(measured)" not in text
    assert ("zero3, 1 slot (out of memory)" in text) == (
        picture.name not in OF_PIPELINES
    )  # it is no pipeline


def test_a_step_is_as_long_as_its_median_and_divided_as_it_was_recorded() -> None:
    """Under the profiler it took 0.4 s; 0.2 s without."""
    apart = row("zero1", repetition([0.2, 0.2], parts=PARTS), repetition([0.2]))
    (panel,) = drawn(parts_picture(results(apart, row("zero2"))))
    assert names(panel) == ["zero1"]
    ends = [(bar.get_x(), bar.get_width()) for bar in panel.patches]
    assert ends == [
        (0, pytest.approx(5)),
        (pytest.approx(5), pytest.approx(45)),
        (pytest.approx(50), pytest.approx(100)),
        (pytest.approx(150), pytest.approx(40)),
        (pytest.approx(190), pytest.approx(10)),
    ]
    assert labels(panel) == ["200"]


def test_parts_of_a_given_table_are_shares() -> None:
    (panel,) = drawn(
        parts_picture(results_of_table([{"name": "a", "forward_share": 0.4, "backward_share": 0.6}]))
    )
    assert widths_of(panel) == [pytest.approx(40), pytest.approx(60)]


def widths_of(panel: Axes) -> list[float]:
    return [bar.get_width() for bar in panel.patches]


def test_loss_and_accuracy_of_a_given_table() -> None:
    table = [{"name": "zero1", "loss": 2.1, "accuracy": 0.8}, {"name": "zero2", "loss": 2.2}]
    losses, accuracies = drawn(
        final_picture(results_of_table([*table, {"name": "zero3", "error": "out of memory"}]))
    )
    assert (names(losses), widths(losses)) == (["zero1", "zero2"], [2.1, 2.2])
    assert (names(accuracies), widths(accuracies)) == (["zero1"], [0.8])
    assert "zero3 (failed)" in words(losses.get_figure())  # type: ignore[arg-type]


def test_a_strategy_has_one_colour_in_all_pictures() -> None:
    found = comparison()
    colour = colours(found)
    assert len(set(colour.values())) == len(colour) == 4
    by_bar = [bar.get_facecolor() for bar in drawn(throughput_picture(found))[0].patches]
    assert by_bar[0] == by_bar[2] != by_bar[1] == by_bar[3]
    assert [bar.get_facecolor() for bar in drawn(memory_picture(found))[0].patches] == by_bar


def test_the_palette_is_distinct_names_on_light_and_on_dark() -> None:
    """WCAG 2: graphics have a contrast of their ground of 2 at least here, where each has its name beside it."""
    for at, ground in ((0, "#ffffff"), (1, "#1a2027")):
        for colour in (pair[at] for pair in PALETTE):
            light, dark = sorted((luminance(colour) + 0.05, luminance(ground) + 0.05), reverse=True)
            assert light / dark >= 2, colour


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def everything(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


@pytest.mark.parametrize("picture", OF_MEASURED, ids=lambda each: each.name)
def test_nothing_is_cut_off(picture: Picture) -> None:
    """Long names and large numbers: every text lies within its figure."""
    name = "zero3, micro 4, activation checkpointing, compiled"
    many = {"model_state_bytes_by_rank": (60 * 2**30,), "pipeline_step": recorded(OF_TWO)}
    slow = repetition([1234.5], bubble=0.5, bubble_ideal=0.4, **many)
    rows = [
        row(f"{name} {at}", slow, repetition([1250.0]), slots=n, pipe_parallel_size=2)
        for at in (1, 2)
        for n in (1, 64)
    ]
    figure = everything(picture.draw(results(*rows, failed(name, slots=64))))
    with drawing():
        figure.draw_without_rendering()  # which lays it out
    wide = figure.get_figwidth() * figure.dpi
    ticks = {
        tick for panel in figure.axes for tick in panel.get_xticklabels()
    }  # those out of view are not drawn
    for text in figure.findobj(Text):
        if text.get_text() and text not in ticks:
            box = text.get_window_extent()
            assert box.x0 >= -1, text
            assert box.x1 <= wide + 1, text


def test_the_same_results_give_the_same_svg() -> None:
    once, again = (svg_of(everything(loss_picture(comparison())), "loss") for _ in range(2))
    assert once == again


def test_signs_of_mathematics_in_a_name_are_signs() -> None:
    figure = everything(throughput_picture(results(row("$x^2$ <b>&amp;"), row("戦略"))))
    svg = svg_of(figure, "throughput")
    assert "$x^2$ &lt;b&gt;&amp;amp;" in svg
    assert "戦略" in svg


def test_every_picture_has_a_caption() -> None:
    found = comparison()
    assert "zero0 on 2 slots does 2.02 times as much as zero1 on 1 slot" in caption("throughput", found)
    assert "pipeline on 2 slots takes least, 511 MiB" in caption("memory", found)
    assert "off by 8.3 % at most" in caption("memory", found)
    assert "zero0 on 2 slots is there after" in caption("loss", found)
    assert "zero0 keeps most: 94.3 %" in caption("scaling", found)
    assert "(p-1)/(m+p-1)" in caption("bubble", found)


def test_matplotlib_is_loaded_where_something_is_drawn_and_pyplot_never() -> None:
    code = """
import sys
from determined_ds.report.written import create_performance_visualizations, write_report
from determined_ds.report.table import results_table
from tests.report.making import comparison
results_table(comparison())
print(sorted({"matplotlib", "numpy", "torch"} & set(sys.modules)))
from determined_ds.report.pictures import throughput_picture
throughput_picture(comparison())
print(sorted({"matplotlib.pyplot", "torch"} & set(sys.modules)))
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n[]\n"


def test_the_settings_of_others_stay_theirs() -> None:
    with matplotlib.rc_context({"font.size": 31}):
        svg_of(everything(throughput_picture(comparison())), "throughput")
        assert matplotlib.rcParams["font.size"] == 31
