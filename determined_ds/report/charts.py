"""Results, profiles and partitions as pictures.

Bars begin at zero, are named where they stand, and carry their number; a strategy has one colour in all pictures, and
so has a part of a step. What was not measured is named below.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.documents.files import write_whole
from determined_ds.pipe.partition import Partition, rank_seconds, read_partition
from determined_ds.report.columns import LEAST_SHARE, step_unit
from determined_ds.report.numbers import byte_unit, count, number, percent, printable
from determined_ds.report.results import PARTS, Results, Row
from determined_ds.report.style import (
    DARK,
    GROUND,
    INK,
    LIGHT,
    MUTED,
    PALETTE,
    ROW_IN,
    SMALL_PT,
    drawing,
    figure_of,
    png_of,
    strategy_colours,
)
from determined_ds.report.verdict import label, name_of, unmeasured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT_PT = 10
LONGEST_LABEL = 54  # of a name, on lines of:
LABEL_WIDTH = 20
LINE_IN = 0.15  # of a line of a name
NOTE_WIDTH = 74
APART = 0.45  # between bars of other numbers of slots
ROOM = 1.22  # of an axis beside its longest bar, for the number
DOT: dict[str, Any] = {"markeredgecolor": GROUND, "markersize": 7, "zorder": 4}
PART_COLOURS = dict(zip(PARTS, PALETTE, strict=False))
MOST_RANKS = 32  # bars; of more ranks, those with the longest and the shortest steps
ROOMY = 0.09  # share of the longest bar in which a number fits
KINDS = 7  # of layers with a colour of their own; the rest share one


# ------------------------------------------------------------------------------- what the pictures are made of


def height_of(rows: Sequence[Row], results: Results) -> float:
    """Inches that bars of these rows take, their names beside them."""
    lines = max(name.count("\n") + 1 for name in _labels(rows, results))
    return max(0.6, max(ROW_IN, 0.05 + LINE_IN * lines) * (_places(rows)[-1] + 1))


def _labels(rows: Sequence[Row], results: Results) -> list[str]:
    """The rows' names, long ones on several lines; no two rows that differ have the same."""
    names = [label(row, results, ", ", LONGEST_LABEL) for row in rows]
    return ["\n".join(textwrap.wrap(name, LABEL_WIDTH, break_on_hyphens=False)) or name for name in names]


def _places(rows: Sequence[Row]) -> list[float]:
    """Where each row's bar is, downwards: those on as many slots together, where they follow each other."""
    changes = [before.slots != row.slots for before, row in itertools.pairwise(rows)]
    together = sum(changes) == len({row.slots for row in rows}) - 1
    return list(
        itertools.accumulate((1 + APART * (is_other and together) for is_other in changes), initial=0.0)
    )


def _bars(
    panel: Axes,
    results: Results,
    rows: Sequence[Row],
    values: Sequence[float],
    spreads: Sequence[tuple[float, float]] | None = None,
    reach: Sequence[float] = (),
) -> None:
    """Bars from zero, with whiskers where there are spreads; each has its number right of all that is drawn of it."""
    colours = strategy_colours(results)
    whiskers = spreads or [(value, value) for value in values]
    ends = reach or [max(value, high) for value, (_, high) in zip(values, whiskers, strict=True)]
    for at, row, value, (low, high), end in zip(_places(rows), rows, values, whiskers, ends, strict=True):
        panel.barh(at, value, 0.7, color=colours[row.name])
        if low < high:
            error = [[max(0, value - low)], [max(0, high - value)]]
            panel.errorbar(value, at, xerr=error, color=INK, elinewidth=1.2, capsize=3)
        _beside(panel, end, at, number(value, 3))
    _name_bars(panel, results, rows, _places(rows))
    panel.set_xlim(0, ROOM * max(ends) or 1)


def _name_bars(panel: Axes, results: Results, rows: Sequence[Row], places: Sequence[float]) -> None:
    """The rows' names at the left, the first on top."""
    names = _labels(rows, results)
    size = SMALL_PT if any("\n" in name for name in names) else FONT_PT
    panel.set_yticks(places, names, color=INK, fontsize=size, linespacing=1.05)
    panel.set_ylim(places[-1] + 0.6, -0.6)
    panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
    panel.tick_params(axis="x", length=3)


def _beside(panel: Axes, value: float, at: float, text: str, colour: str = INK, gap: float = 5) -> None:
    """A text right of where a bar ends."""
    how: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL_PT}
    panel.annotate(text, (value, at), xytext=(gap, 0), color=colour, **how)


def _stack(
    panel: Axes, at: float, height: float, pieces: Iterable[tuple[str, float, str, str]], roomy: float = 0.0
) -> float:
    """A bar of pieces side by side: each a name for the legend, a width, a colour and what stands in it, if it fits.

    Returns where it ends.
    """
    end = 0.0
    for name, width, colour, text in pieces:
        panel.barh(at, width, height, left=end, color=colour, label=name)
        if text and width > roomy:
            ink = ink_on(colour)
            panel.text(end + width / 2, at, text, color=ink, ha="center", va="center", fontsize=SMALL_PT)
        end += width
    return end


def _legend(figure: Figure, panel: Axes, where: str, columns: int) -> None:
    handles, names = panel.get_legend_handles_labels()
    each_once = dict(zip(names, handles, strict=True))
    how: dict[str, Any] = {"frameon": False, "fontsize": SMALL_PT, "labelcolor": MUTED, "handlelength": 1.0}
    how |= {"loc": f"outside {where} left", "ncols": columns}
    figure.legend(list(each_once.values()), list(each_once), **how)


def ink_on(colour: str) -> str:
    """What can be read on a colour: dark or light, whichever contrasts more, by WCAG 2's luminance."""
    red, green, blue = ((int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    return DARK if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else LIGHT


def note_missing(figure: Figure, results: Results, *, of_pipelines: bool = False) -> None:
    """Below the axes, what is not in them, and why."""
    missing = [row for row in unmeasured(results) if row.is_pipeline or not of_pipelines]
    if not missing:
        return
    named = "; ".join(f"{label(row, results, ', ')} ({row.status})" for row in missing)
    lines = textwrap.wrap(f"Not measured: {named}", NOTE_WIDTH, max_lines=4, placeholder=" …")
    figure.set_figheight(figure.get_figheight() + 0.17 * len(lines))
    figure.supxlabel("\n".join(lines), x=0.015, ha="left", fontsize=SMALL_PT, color=MUTED, linespacing=1.35)


# ------------------------------------------------------------------------------------------- of a comparison


def throughput(results: Results) -> Figure | None:
    """Samples per second, with the lowest and the highest repetition as whiskers."""
    found = [(row, row.samples_per_second) for row in results.measured]
    known = [(row, value) for row, value in found if value is not None]
    if not known:
        return None
    rows, values = [row for row, _ in known], [value for _, value in known]
    repeated = max(row.num_repetitions for row in rows) > 1
    with drawing():
        figure, (panel,) = figure_of([height_of(rows, results)])
        spreads = [row.samples_per_second_spread or (value, value) for row, value in known]
        _bars(panel, results, rows, values, spreads)
        panel.set_title("Throughput")
        panel.set_xlabel("samples per second" + ("; whiskers: repetitions" if repeated else ""))
        note_missing(figure, results)
    return figure


def memory(results: Results) -> Figure | None:
    """Peak memory of the rank that took most, and its model states measured beside the estimate."""
    peaks = [(row, row.peak_memory_bytes) for row in results.measured if row.peak_memory_bytes is not None]
    states = [row for row in results.measured if row.model_state_bytes is not None]
    rows, sizes = [row for row, _ in peaks], [size for _, size in peaks]
    if not rows and not states:
        return None
    with drawing():
        figure, panels = figure_of([height_of(each, results) for each in (rows, states) if each])
        if rows:
            name, unit = byte_unit(sizes)
            _bars(panels[0], results, rows, [size / unit for size in sizes])
            panels[0].set_title("Peak memory of a rank")
            kind = "resident" if results.accelerator == "cpu" else "device"
            panels[0].set_xlabel(f"{name} of {kind} memory")
        if states:
            _states(panels[-1], results, states)
        note_missing(figure, results)
    return figure


def _states(panel: Axes, results: Results, rows: Sequence[Row]) -> None:
    """Model states as bars, the estimates as marks on them."""
    unit, size = byte_unit(
        each for row in rows for each in (row.model_state_bytes, row.estimated_model_state_bytes)
    )
    estimates = [row.estimated_model_state_bytes for row in rows]
    values = [(row.model_state_bytes or 0) / size for row in rows]
    ends = [max(value, (each or 0) / size) for value, each in zip(values, estimates, strict=True)]
    _bars(panel, results, rows, values, reach=ends)
    for at, each in zip(_places(rows), estimates, strict=True):
        if each is not None:
            panel.plot(
                [each / size] * 2, [at - 0.43, at + 0.43], color=INK, linewidth=1.8, solid_capstyle="butt"
            )
    panel.set_title("Model states of a rank")
    line = "; the upright line is the estimate" if any(each is not None for each in estimates) else ""
    panel.set_xlabel(f"{unit}{line}")


def parts(results: Results) -> Figure | None:
    """Where the time of each row's steps goes: as long as its median step, divided as torch's profiler saw it."""
    rows = [row for row in results.measured if row.parts]
    if not rows:
        return None
    steps = [row.median_step_seconds for row in rows]
    in_time = None not in steps
    name, unit = step_unit(results) if in_time else ("% of a step", 0.01)
    lengths = [(seconds if in_time and seconds else 1) / unit for seconds in steps]
    shares = [row.parts or {} for row in rows]
    there = [part for part in PARTS if any(each.get(part, 0) >= LEAST_SHARE for each in shares)]
    with drawing():
        figure, (panel,) = figure_of([height_of(rows, results) + 0.5])
        for at, length, each in zip(_places(rows), lengths, shares, strict=True):
            pieces = [(part, each.get(part, 0.0) * length, PART_COLOURS[part], "") for part in there]
            end = _stack(panel, at, 0.7, pieces)
            _beside(panel, end, at, number(length, 3) if in_time else "")
        _name_bars(panel, results, rows, _places(rows))
        panel.set_xlim(0, (ROOM if in_time else 1) * max(lengths))
        panel.set_title("A step taken apart")
        panel.set_xlabel(f"{name} of a median step" if in_time else name)
        note_missing(figure, results)
        _legend(figure, panel, "upper", 4)
    return figure


def loss(results: Results) -> Figure | None:
    """The loss against seconds of training, and when each row comes to the loss that all of them reach."""
    rows = [row for row in results.measured if row.loss_curve]
    ends = [end for row in rows if math.isfinite(end := row.loss_curve[-1][1])]
    if not ends:
        return None
    target, most = max(ends), max(row.slots for row in rows)
    reached = [row.seconds_to(target) for row in rows]
    with drawing():
        figure, (curves, times) = figure_of([2.1, height_of(rows, results)])
        colours = strategy_colours(results)
        for row, seconds in zip(rows, reached, strict=True):
            times_s, losses = zip(*row.loss_curve, strict=True)
            style = "-" if row.slots == most else (0, (4, 2))
            curves.plot(times_s, losses, color=colours[row.name], linestyle=style, label=label(row, results))
            if seconds is not None:
                curves.plot(seconds, target, "o", color=colours[row.name], **DOT)
        curves.axhline(target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        curves.set_title(f"Loss; the dots are at {number(target)}")
        window = max(row.window for row in rows)
        curves.set_ylabel(f"loss, mean of {window} steps" if window > 1 else "loss")
        if any(row.slots < most for row in rows):
            curves.set_xlabel(f"dashed: on fewer than {count(most, 'slot')}")
        curves.grid(axis="y")
        for at, row, seconds in zip(_places(rows), rows, reached, strict=True):
            if seconds is None:
                _beside(times, 0, at, "not reached", MUTED)
                continue
            times.barh(at, seconds, 0.12, color=colours[row.name])
            times.plot(seconds, at, "o", color=colours[row.name], **DOT)
            _beside(times, seconds, at, f"{number(seconds, 3)} s", gap=8)
        _name_bars(times, results, rows, _places(rows))
        times.set_title(f"Time to a loss of {number(target)}")
        times.set_xlabel("seconds of training")
        longest = max(row.loss_curve[-1][0] for row in rows)
        for panel in (curves, times):
            panel.set_xlim(0, longest * 1.16)
            panel.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])
        note_missing(figure, results)
    return figure


def scaling(results: Results) -> Figure | None:
    """Scaling efficiency over slots, 100 % where nothing is lost; of strategies on two numbers of slots or more."""
    efficiency = [(row, results.scaling_efficiency(row)) for row in results.measured]
    known = [(row, share) for row, share in efficiency if share is not None]
    if not known:
        return None
    slots = sorted({row.slots for row, _ in known})
    with drawing():
        figure, (panel,) = figure_of([2.4])
        colours = strategy_colours(results)
        panel.axhline(100, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        for name in dict.fromkeys(row.name for row, _ in known):
            points = sorted((slots.index(row.slots), 100 * share) for row, share in known if row.name == name)
            at, shares = zip(*points, strict=True)
            panel.plot(at, shares, "o-", color=colours[name], markersize=6, markeredgecolor=GROUND)
            row = next(row for row, _ in known if row.name == name)
            _beside(panel, at[-1], shares[-1], f"{name_of(row, results, 18)}  {shares[-1]:.0f} %", gap=8)
        panel.set_ylim(0, max(110.0, *(100 * share for _, share in known)) + 6)
        panel.set_xlim(-0.12 * len(slots), (len(slots) - 1) * 1.38)
        panel.set_xticks(range(len(slots)), [count(each, "slot") for each in slots])
        panel.set_yticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100 %"])
        panel.grid(axis="y")
        panel.set_title("Scaling efficiency")
        panel.set_ylabel("share of ideal throughput")
        note_missing(figure, results)
    return figure


def bubble(results: Results) -> Figure | None:
    """Share of time that a pipeline's stages wait, measured beside what the schedule alone costs."""
    rows = [row for row in results.measured if row.bubble is not None]
    if not rows:
        return None
    with drawing():
        figure, (panel,) = figure_of([max(1.0, 0.56 * len(rows))])
        colours = strategy_colours(results)
        for at, row in enumerate(rows):
            measured, ideal = 100 * (row.bubble or 0), row.bubble_ideal
            panel.barh(at - 0.2, measured, 0.36, color=colours[row.name])
            _beside(panel, measured, at - 0.2, f"{percent(row.bubble)} measured")
            if ideal is not None:
                panel.barh(at + 0.2, 100 * ideal, 0.36, color=colours[row.name], alpha=0.4)
                _beside(panel, 100 * ideal, at + 0.2, f"{percent(ideal)} ideal", MUTED)
        _name_bars(panel, results, rows, range(len(rows)))
        longest = max(100 * max(row.bubble or 0, row.bubble_ideal or 0) for row in rows)
        panel.set_xlim(0, 1.75 * longest or 1)
        panel.set_title("A pipeline's bubble")
        panel.set_xlabel("% of a step's time that its stages wait")
        note_missing(figure, results, of_pipelines=True)
    return figure


# ------------------------------------------------------------------------------------------- of a run


def profile_picture(profile: Mapping[str, Any]) -> Figure | None:
    """A bar a rank, made of the parts of its mean step; None where no step was recorded.

    Args:
        profile: Of ``profile.json``.
    """
    ranks = [rank for rank in profile["ranks"] if rank["step_s"]]
    if len(ranks) > MOST_RANKS:  # those with the longest and the shortest steps
        by_length = sorted(ranks, key=lambda rank: rank["step_s"])
        kept = {rank["rank"] for rank in (*by_length[: MOST_RANKS // 2], *by_length[-MOST_RANKS // 2 :])}
        ranks = [rank for rank in ranks if rank["rank"] in kept]
    if not ranks:
        return None
    there = [part for part in PARTS if any(rank["seconds"].get(part) for rank in ranks)]
    roomy = 1000 * ROOMY * max(rank["step_s"] for rank in ranks)
    with drawing("profile"):
        figure, (panel,) = figure_of([max(0.6, ROW_IN * len(ranks)) + 0.45])
        for at, rank in enumerate(ranks):
            seconds = {part: rank["seconds"].get(part, 0.0) for part in there}
            pieces = [
                (part, 1000 * each, PART_COLOURS[part], percent(each / rank["step_s"]))
                for part, each in seconds.items()
            ]
            _stack(panel, at, 0.72, pieces, roomy)
        panel.set_yticks(range(len(ranks)), [f"rank {rank['rank']}" for rank in ranks], color=INK)
        panel.set_ylim(len(ranks) - 0.4, -0.6)
        panel.set_xlabel("milliseconds of a mean step")
        left_out = len(profile["ranks"]) - len(ranks)
        panel.set_title("A step taken apart" + (f" ({left_out} ranks are left out)" if left_out else ""))
        _legend(figure, panel, "lower", 4)
    return figure


def partition_picture(found: Partition) -> Figure | None:
    """How a pipeline's layers are shared out by their times: a bar a rank, beside that by parameters.

    None where there are more ranks than there is room for bars.

    Args:
        found: Of ``partition.json``.
    """
    ranks = found.pipe.ranks
    if ranks > MOST_RANKS:
        return None
    seconds: dict[str, float] = {}
    for layer in found.layers:
        seconds[layer.name] = seconds.get(layer.name, 0.0) + layer.seconds
    kinds = sorted(seconds, key=lambda name: -seconds[name])[:KINDS]  # those that take longest
    colours = dict(zip(kinds, PALETTE, strict=False))
    cuts = {"By parameters": found.by_parameters, "By measured times": found.bounds}
    longest = 1000 * max(max(rank_seconds(found.layers, bounds, found.pipe)) for bounds in cuts.values())
    with drawing("partition"):
        height = max(0.6, ROW_IN * ranks)
        figure, panels = figure_of([height, height])
        figure.set_figheight(figure.get_figheight() + 0.45)
        for panel, (title, bounds) in zip(panels, cuts.items(), strict=True):
            pieces: list[list[tuple[str, float, str, str]]] = [[] for _ in range(ranks)]
            for part, (first, next_first) in enumerate(itertools.pairwise(bounds)):
                for name, run in itertools.groupby(
                    found.layers[first:next_first], key=lambda layer: layer.name
                ):
                    layers = list(run)
                    width = 1000 * sum(layer.seconds for layer in layers)
                    kind = printable(name) if name in colours else "others"
                    piece = kind, width, colours.get(name, MUTED), str(len(layers))
                    pieces[found.pipe.rank_of(part)].append(piece)
            for rank, each in enumerate(pieces):
                end = _stack(panel, rank, 0.72, each, 0.08 * longest)
                text = number(end, 3)
                panel.text(end + 0.01 * longest, rank, text, va="center", color=INK, fontsize=SMALL_PT)
            panel.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], color=INK)
            panel.set_ylim(ranks - 0.4, -0.6)
            panel.set_xlim(0, 1.2 * longest)
            panel.set_title(title)
        panels[-1].set_xlabel("ms of a micro-batch, forward and backward; in bars: layers")
        _legend(figure, panels[0], "lower", 3)
    return figure


def write_partition_picture(partition: Path, picture: Path) -> None:
    """Draw ``partition.json`` as ``partition.png``; nothing where there is no room for all ranks.

    Args:
        partition: The file.
        picture: Where to.
    """
    found = read_partition(partition.read_text())
    if found is not None and (figure := partition_picture(found)) is not None:
        write_whole(picture, png_of(figure))


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
    "scaling": (
        scaling,
        "100 % would be twice as fast on twice as many slots, the global batch unchanged.",
    ),
    "bubble": (
        bubble,
        "Pale is what the schedule alone costs, (p-1)/(m+p-1) of 1F1B with p stages and m micro-batches. More of them"
        " make it smaller; what is measured beyond it comes of uneven stages and of sending between them.",
    ),
}
