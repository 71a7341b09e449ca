"""Pictures of a search, by matplotlib's objects alone: no window, and nothing left behind in ``pyplot``."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from determined_ds.documents.files import write_whole
from determined_ds.experiment.space import Axis
from determined_ds.search.display import short_names, shown
from determined_ds.search.study import COMPLETED, DROPPED, FAILED, STOPPED, StudyTrial

DPI = 150
INK, GREY, PALE, ACCENT = "#222222", "#777777", "#c8c8c8", "#d1495b"
USUAL = 0.9  # of the trials lie within the colours; a few bad ones do not take them all
NUM_COLOURS, PALEST = 256, 0.88  # the palest colours of the scale cannot be seen on white
NUM_TICKS = 5
MOST_CATEGORIES = 12
LONGEST_LABEL = 16
INCHES_AN_AXIS = 1.9
MOST_INCHES = 24.0
MARGIN = 0.06  # above and below what is drawn along an axis


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is drawn.

    Args:
        title: The experiment's name.
        metric: The searcher's.
        smaller_is_better: Of it.
        trials: One or more of them with a finite metric.
        axes: What was searched.
    """

    title: str
    metric: str
    smaller_is_better: bool
    trials: tuple[StudyTrial, ...]
    axes: tuple[Axis, ...]

    @cached_property
    def rated(self) -> list[tuple[StudyTrial, float]]:
        """The trials that have validated, each with its best metric, the best last: it is drawn on top."""
        found = [(trial, best[1]) for trial in self.trials if (best := trial.best(self.smaller_is_better))]
        sign = 1 if self.smaller_is_better else -1
        return sorted(found, key=lambda item: (sign * item[1], item[0].number), reverse=True)

    @property
    def heading(self) -> str:
        better = "smaller" if self.smaller_is_better else "larger"
        return f"{self.title}: {self.metric}, {better} is better"

    def colour(self, value: float) -> Any:
        """Of a metric."""
        return self._colours.to_rgba(numpy.array([value]))[0]

    @cached_property
    def _colours(self) -> ScalarMappable:
        """Metrics to colours that stay distinct for a colour-blind reader and in grey: the better the darker."""
        best_first = [value for _, value in reversed(self.rated)]
        worst = best_first[math.ceil(USUAL * (len(best_first) - 1))]
        low, high = sorted((best_first[0], worst))
        if low == high:
            low, high = low - 0.5, high + 0.5
        dark_first = [colormaps["viridis"](PALEST * i / (NUM_COLOURS - 1)) for i in range(NUM_COLOURS)]
        colours = dark_first if self.smaller_is_better else dark_first[::-1]
        return ScalarMappable(norm=Normalize(low, high), cmap=ListedColormap(colours))


# ------------------------------------------------------------------------------------------------ history


def draw_history(subject: Subject, path: Path) -> None:
    """Each trial's best metric with the best so far; beside it, how each trial got there."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_trials(left, subject)
    _draw_courses(right, subject)
    figure.suptitle(subject.heading, color=INK, fontsize=12)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, dpi=DPI, format="png")
    write_whole(path, picture.getvalue())


def _draw_trials(axes: Axes, subject: Subject) -> None:
    rated = {trial.number: value for trial, value in subject.rated}
    better = min if subject.smaller_is_better else max
    numbers = sorted(rated)
    so_far = [better(rated[number] for number in numbers[: end + 1]) for end in range(len(numbers))]
    numbers.append(max(trial.number for trial in subject.trials))
    axes.step(numbers, [*so_far, so_far[-1]], where="post", color=ACCENT, lw=1.5, label="best so far")
    kinds = (
        ((COMPLETED,), "o", INK, "trained to its end"),
        ((STOPPED,), "o", "white", "stopped early"),
        ((DROPPED, FAILED), "X", GREY, "failed later"),
    )
    for statuses, marker, face, label in kinds:
        some = [
            trial.number for trial in subject.trials if trial.status in statuses and trial.number in rated
        ]
        if some:
            heights = [rated[number] for number in some]
            axes.plot(some, heights, marker, ms=6, mfc=face, mec=INK, ls="none", label=label)
    ended = [trial.number for trial in subject.trials if trial.status in (DROPPED, FAILED)]
    gone = [number for number in ended if number not in rated]
    if gone:  # along the lower edge, whatever the metric is
        edge = axes.get_xaxis_transform()
        axes.plot(gone, [0.02] * len(gone), "x", ms=5, color=GREY, transform=edge, label="dropped or failed")
    _plain(axes, "trial", f"{subject.metric}, the best of each trial")
    axes.legend(frameon=False, fontsize=8)


def _draw_courses(axes: Axes, subject: Subject) -> None:
    for trial, value in subject.rated:
        is_best = trial is subject.rated[-1][0]
        steps, values = list(trial.values), list(trial.values.values())
        colour = subject.colour(value)
        width, size = (2.2, 5) if is_best else (1.1, 3)
        axes.plot(steps, values, "-o", color=colour, lw=width, ms=size)
        if is_best:
            at = (steps[-1], values[-1])
            axes.annotate(
                f"trial {trial.number}", at, (5, 5), textcoords="offset points", fontsize=8, color=INK
            )
    axes.set_xlim(0, 1.1 * max(max(trial.values) for trial, _ in subject.rated) or 1)
    _plain(axes, "batches", f"{subject.metric}, course of each trial")


def _plain(axes: Axes, x: str, y: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY, labelcolor=INK, labelsize=9)


# -------------------------------------------------------------------------------------- parallel coordinates


@dataclass(frozen=True, kw_only=True)
class ParallelAxis:
    """One of the vertical lines.

    Args:
        name: Below it.
        place: A value's height, 0 to 1.
        ticks: Heights and labels.
    """

    name: str
    place: Callable[[Any], float]
    ticks: Sequence[tuple[float, str]]


def draw_parallel_coordinates(subject: Subject, path: Path) -> None:
    """A line for each trial through its hyperparameters to its metric; dropped and failed ones end before it."""
    names = short_names(tuple(axis.name for axis in subject.axes))
    columns = [_column(axis, names[axis.name], subject) for axis in subject.axes]
    columns.append(_metric_column(subject))
    width = min(MOST_INCHES, INCHES_AN_AXIS * len(columns) + 1.5)
    figure = Figure(figsize=(width, 4.8), layout="constrained")
    axes = figure.subplots()
    rated = {trial.number for trial, _ in subject.rated}
    for trial in subject.trials:
        if trial.number not in rated:
            heights = _heights(subject, columns, trial)
            axes.plot(range(len(heights)), heights, color=PALE, lw=1, ls=(0, (2, 2)))
    for trial, value in subject.rated:
        is_best = trial is subject.rated[-1][0]
        heights = [*_heights(subject, columns, trial), columns[-1].place(value)]
        colour = subject.colour(value)
        axes.plot(range(len(heights)), heights, "-", color=colour, lw=3 if is_best else 1.3, alpha=0.9)
        if is_best:
            axes.plot(range(len(heights)), heights, "o", color=ACCENT, ms=5, zorder=3)
    for index, column in enumerate(columns):
        _draw_column(axes, index, column)
    axes.set_xlim(-0.25, len(columns) - 0.5)
    axes.set_ylim(-MARGIN, 1 + MARGIN)
    axes.set_xticks(range(len(columns)), [_broken(column.name) for column in columns], color=INK)
    axes.tick_params(length=0, labelsize=9)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    best = f"the best, trial {subject.rated[-1][0].number}, is marked"
    figure.suptitle(f"{subject.heading}; {best}", color=INK, fontsize=11)
    _save(figure, path)


def _heights(subject: Subject, columns: Sequence[ParallelAxis], trial: StudyTrial) -> list[float]:
    return [column.place(trial.point[axis.name]) for axis, column in zip(subject.axes, columns, strict=False)]


def _draw_column(axes: Axes, index: int, column: ParallelAxis) -> None:
    axes.axvline(index, color=INK, lw=1, ymin=MARGIN / (1 + 2 * MARGIN), ymax=1 - MARGIN / (1 + 2 * MARGIN))
    for height, label in column.ticks:
        axes.plot([index - 0.015, index + 0.015], [height, height], color=INK, lw=1)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
        at: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
        axes.annotate(label, (index, height), (6, 0), **at, fontsize=8, color=INK, bbox=box, zorder=4)


def _column(axis: Axis, name: str, subject: Subject) -> ParallelAxis:
    if axis.kind == "categorical":
        return _categories(axis, name)
    low, high = axis.spec["minval"], axis.spec["maxval"]
    if axis.kind == "log":
        base = float(axis.spec["base"])
        low, high = sorted((base**low, base**high))
        if low > 0:
            return _scaled(name, low, high, math.log10, LogLocator(numticks=NUM_TICKS))
    return _scaled(name, low, high, float, MaxNLocator(NUM_TICKS, integer=axis.kind == "int"))


def _metric_column(subject: Subject) -> ParallelAxis:
    values = [value for _, value in subject.rated]
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return _scaled(subject.metric, low, high, float, MaxNLocator(NUM_TICKS))


def _scaled(
    name: str, low: float, high: float, scale: Callable[[float], float], locator: MaxNLocator | LogLocator
) -> ParallelAxis:
    start, end = scale(low), scale(high)

    def place(value: Any) -> float:
        return (scale(value) - start) / (end - start) if end > start else 0.5

    slack = 1e-9
    values = [float(tick) for tick in locator.tick_values(low, high)]
    within = [value for value in values if value > 0 or scale is float]
    ticks = [(place(value), shown(value)) for value in within if -slack <= place(value) <= 1 + slack]
    if len(ticks) < 2:  # a range within one power of ten
        ticks = [(place(value), shown(float(value))) for value in (low, high)]
    return ParallelAxis(name=name, place=place, ticks=ticks)


def _categories(axis: Axis, name: str) -> ParallelAxis:
    texts = list(dict.fromkeys(json.dumps(value, sort_keys=True) for value in axis.spec["vals"]))
    height = {text: index / (len(texts) - 1) if len(texts) > 1 else 0.5 for index, text in enumerate(texts)}
    every = math.ceil(len(texts) / MOST_CATEGORIES)
    ticks = [(height[text], _cut(text.strip('"'))) for text in texts[::every]]
    return ParallelAxis(name=name, place=lambda value: height[json.dumps(value, sort_keys=True)], ticks=ticks)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def _broken(name: str) -> str:
    """A long name on several lines, broken where its words end."""
    lines = [""]
    for word in name.replace(".", "._").split("_"):
        if lines[-1] and len(lines[-1]) + len(word) > LONGEST_LABEL:
            lines[-1] += "_"
            lines.append("")
        lines[-1] += ("_" if lines[-1] else "") + word
    return "\n".join(lines)
