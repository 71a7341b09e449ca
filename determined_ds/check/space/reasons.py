"""Why points of a search space do not run, and where in the space these points lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from determined_ds.check.space.judging import Judgement
from determined_ds.errors import Problem
from determined_ds.experiment.space.points import Point
from determined_ds.experiment.space.space import Axis

MOST_NAMED = 6
MOST_BOXES = 4
CONTINUOUS = ("double", "log")


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a space: all points with certain values on some axes.

    Args:
        axes: Those that matter.
        values: The values on each of them, in the order in which points have them.
        words: The same in words.
    """

    axes: tuple[Axis, ...]
    values: tuple[tuple[Any, ...], ...]
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " and ".join(f"{axis.name} {word}" for axis, word in zip(self.axes, self.words, strict=True))


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One reason why points do not run, or are probably a mistake.

    Args:
        problem: That of the first point; all have its code and key.
        num_points: Points that have the reason.
        share: Their share of the space, or of the sample.
        where: Parts of the space that contain all of these points; empty where no axis matters.
        only: Whether every checked point there has the reason.
        example: One of them.
    """

    problem: Problem
    num_points: int
    share: float
    where: tuple[Region, ...]
    only: bool
    example: Point

    @property
    def code(self) -> str:
        return self.problem.code

    @property
    def key(self) -> str:
        return self.problem.key

    @property
    def everywhere(self) -> bool:
        """Whether every point has it: then it is an error of the configuration, not of a point."""
        return self.only and not self.where

    def __str__(self) -> str:
        count = "1 point" if self.num_points == 1 else f"{self.num_points:,} points"
        every = "the one point" if self.num_points == 1 else f"all {count}"
        if not self.where:
            return every if self.only else count
        places = ", or ".join(map(str, self.where))
        return f"{every} with {places}" if self.only else f"{count}, among those with {places}"


def reasons_to_fail(axes: Sequence[Axis], verdicts: Iterable[Judgement]) -> tuple[Reason, ...]:
    """Every reason why points do not run, the most frequent first.

    Args:
        axes: Of the space that the points are of.
        verdicts: See :func:`determined_ds.check.space.judging.judge_points`.
    """
    return _reasons(axes, verdicts, lambda verdict: verdict.problems)


def reasons_to_warn(axes: Sequence[Axis], verdicts: Iterable[Judgement]) -> tuple[Reason, ...]:
    """Every warning of the points that run, or of all where none does, the most frequent first; shares are of all."""
    verdicts = list(verdicts)
    some_run = any(not verdict.problems for verdict in verdicts)
    return _reasons(axes, verdicts, lambda verdict: () if some_run and verdict.problems else verdict.warnings)


def _reasons(
    axes: Sequence[Axis], verdicts: Iterable[Judgement], problems_of: Callable[[Judgement], Iterable[Problem]]
) -> tuple[Reason, ...]:
    verdicts = list(verdicts)
    points = [point for verdict in verdicts for point in verdict.points]
    codes = _Codes(axes, points)
    num_drawn = sum(point.drawn for point in points)
    first: dict[tuple[str, str], Problem] = {}
    having: dict[tuple[str, str], set[int]] = {}
    start = 0
    for verdict in verdicts:
        here = range(start, start + len(verdict.points))
        start += len(verdict.points)
        for problem in problems_of(verdict):
            name = (problem.code, problem.key)
            first.setdefault(name, problem)
            having.setdefault(name, set()).update(here)
    reasons = []
    for name, members in having.items():
        boxes, only = _described(codes, members)
        drawn = sum(points[index].drawn for index in members)
        reasons.append(
            Reason(
                problem=first[name],
                num_points=len(members),
                share=drawn / num_drawn if num_drawn else 1.0,
                where=tuple(codes.where(box) for box in boxes if box),
                only=only,
                example=points[min(members)],
            )
        )
    return tuple(sorted(reasons, key=lambda reason: -reason.num_points))


# A part of a space: index of an axis -> the codes of values on it; an axis that is not in it may have any.
Box = dict[int, frozenset[int]]


class _Codes:
    """Points as rows of small numbers: on each axis, the number of the value."""

    def __init__(self, axes: Sequence[Axis], points: Sequence[Point]) -> None:
        self.axes = axes
        self.values: list[list[Any]] = [[] for _ in axes]
        known: list[dict[str, int]] = [{} for _ in axes]
        self.rows: list[tuple[int, ...]] = []
        for point in points:
            row = []
            for index, value in enumerate(point.values):
                name = repr(value)
                code = known[index].get(name)
                if code is None:
                    code = known[index][name] = len(self.values[index])
                    self.values[index].append(value)
                row.append(code)
            self.rows.append(tuple(row))

    def hull(self, members: Iterable[int], among: Iterable[int]) -> Box:
        """The smallest box around some points, on the given axes; an axis on which they have all values is left out."""
        rows = [self.rows[index] for index in members]
        box = {}
        for axis in among:
            codes = frozenset(row[axis] for row in rows)
            if self.axes[axis].kind in CONTINUOUS and len(codes) > MOST_NAMED:
                codes = self._range(axis, codes)
            if len(codes) < len(self.values[axis]):
                box[axis] = codes
        return box

    def _range(self, axis: int, codes: frozenset[int]) -> frozenset[int]:
        values = self.values[axis]
        low, high = (pick(values[code] for code in codes) for pick in (min, max))
        return frozenset(code for code, value in enumerate(values) if low <= value <= high)

    def inside(self, box: Box, among: Iterable[int]) -> list[int]:
        """Those of some points that lie in a box."""
        held = [(axis, box[axis]) for axis in box]
        return [index for index in among if all(self.rows[index][axis] in codes for axis, codes in held)]

    def where(self, box: Box) -> Region:
        axes, values, words = [], [], []
        for axis in sorted(box):
            own = [self.values[axis][code] for code in sorted(box[axis])]
            others = [value for code, value in enumerate(self.values[axis]) if code not in box[axis]]
            axes.append(self.axes[axis])
            values.append(tuple(own))
            words.append(_in_words(own, others))
        return Region(axes=tuple(axes), values=tuple(values), words=tuple(words))


def _described(codes: _Codes, members: set[int]) -> tuple[list[Box], bool]:
    """The fewest boxes on the fewest axes that contain all members; and whether they contain no other point."""
    everyone = range(len(codes.rows))
    every_axis = range(len(codes.axes))
    box = _narrowed(codes, codes.hull(members, every_axis), everyone)
    held = codes.inside(box, everyone)
    if len(held) == len(members):
        return [box], True
    # One box is not enough: try one for each value of an axis.
    best: list[Box] | None = None
    for axis in every_axis:
        boxes = _split(codes, members, axis)
        boxes = boxes and [_widened(codes, box, members) for box in boxes]
        if boxes and (best is None or (len(boxes), _size(boxes)) < (len(best), _size(best))):
            best = boxes
    return (best, True) if best else ([box], False)


def _size(boxes: list[Box]) -> int:
    return sum(len(codes) for box in boxes for codes in box.values())


def _widened(codes: _Codes, box: Box, members: set[int]) -> Box:
    """The box without axes that exclude only members, which other boxes contain."""
    everyone = range(len(codes.rows))
    return _without_axes(box, lambda without: members.issuperset(codes.inside(without, everyone)))


def _narrowed(codes: _Codes, box: Box, among: Sequence[int]) -> Box:
    """The box without axes that exclude no point."""
    count = len(codes.inside(box, among))
    return _without_axes(box, lambda without: len(codes.inside(without, among)) == count)


def _without_axes(box: Box, may: Callable[[Box], bool]) -> Box:
    """The box without each axis that may be left out."""
    for axis in list(box):
        without = {other: held for other, held in box.items() if other != axis}
        if may(without):
            box = without
    return box


def _split(codes: _Codes, members: set[int], axis: int) -> list[Box] | None:
    """The members in one box for each value of an axis, values of the same box together; None if that fails."""
    others = [other for other in range(len(codes.axes)) if other != axis]
    by_value: dict[int, list[int]] = {}
    for index in sorted(members):
        by_value.setdefault(codes.rows[index][axis], []).append(index)
    if len(by_value) > 4 * MOST_BOXES:
        return None
    joined: dict[tuple[tuple[int, frozenset[int]], ...], set[int]] = {}
    for value, here in by_value.items():
        around = [index for index, row in enumerate(codes.rows) if row[axis] == value]
        box = _narrowed(codes, codes.hull(here, others), around)
        if len(codes.inside(box, around)) != len(here):
            return None
        joined.setdefault(tuple(sorted(box.items())), set()).add(value)
        if len(joined) > MOST_BOXES:
            return None
    return [{axis: frozenset(values), **dict(box)} for box, values in joined.items()]


def _in_words(values: Sequence[Any], others: Sequence[Any]) -> str:
    """``= 2 or 3``; of many, ``from 0.1 to 0.5`` where no other value lies between, or ``other than 8``."""
    if all(map(_is_number, values)):
        values = sorted(values)
    if len(values) <= MOST_NAMED:
        return f"= {_listed(values)}"
    if all(map(_is_number, [*values, *others])) and not any(
        values[0] <= other <= values[-1] for other in others
    ):
        return f"from {_shown(values[0])} to {_shown(values[-1])}"
    if len(others) <= MOST_NAMED:
        return f"other than {_listed(others)}"
    return f"= {', '.join(map(_shown, values[:MOST_NAMED]))} or {len(values) - MOST_NAMED} more values"


def _listed(values: Sequence[Any]) -> str:
    *most, last = map(_shown, values)
    return f"{', '.join(most)} or {last}" if most else last


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)
