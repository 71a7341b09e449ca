"""Points that do not run are counted by reason, and each reason is told with the part of the space it lies in."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.check.space.judging import Judgement
from determined_ds.check.space.reasons import Reason, Region, reasons_to_fail, reasons_to_warn
from determined_ds.errors import Problem
from determined_ds.experiment.space.points import Point
from determined_ds.experiment.space.space import Axis


def axes(**values: list[Any]) -> list[Axis]:
    return [Axis(path=(name,), spec={"type": "categorical", "vals": vals}) for name, vals in values.items()]


def told(code: str) -> Problem:
    return Problem(key="k", code=code, message=f"is {code}", fix="write another")


def verdicts(points: list[Point], codes: Callable[..., list[str]], *, warn: bool = False) -> list[Judgement]:
    """Of each point the problems, or the warnings, that a function tells of its values."""
    found: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        found.setdefault(tuple(codes(*point.values)), []).append(point)
    return [
        Judgement(
            problems=() if warn else tuple(map(told, names)),
            warnings=tuple(map(told, names)) if warn else (),
            points=tuple(members),
            resolved=None,
        )
        for names, members in found.items()
    ]


def every(space: list[Axis]) -> list[Point]:
    return [Point(values, {}) for values in itertools.product(*(axis.spec["vals"] for axis in space))]


def reasons(space: list[Axis], codes: Callable[..., list[str]]) -> list[Reason]:
    return list(reasons_to_fail(space, verdicts(every(space), codes)))


SPACE = axes(stage=[0, 1, 2, 3], micro=[4, 8, 16], batch=[8, 16, 32])


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda s, m, b: s > 1, "all 18 points with stage = 2 or 3"),
        (lambda s, m, b: s > 1 and b == 8, "all 6 points with stage = 2 or 3 and batch = 8"),
        (
            lambda s, m, b: s == 3 and m == 4 and b == 8,
            "the one point with stage = 3 and micro = 4 and batch = 8",
        ),
        (lambda s, m, b: s == 3 or b == 8, "all 18 points with batch = 8, or stage = 3"),
        (lambda s, m, b: m > b, "all 4 points with micro = 16 and batch = 8"),
        (lambda s, m, b: True, "all 36 points"),
        (lambda s, m, b: (s + m // 4 + b // 8) % 2, "18 points"),
    ],
)
def test_where_the_points_lie(fails: Callable[..., bool], said: str) -> None:
    (reason,) = reasons(SPACE, lambda *values: ["x"] if fails(*values) else [])
    assert str(reason) == said
    assert fails(*reason.example.values)
    assert reason.share == reason.num_points / 36
    assert reason.everywhere == (reason.num_points == 36)


def test_nothing_that_fails_has_no_reason() -> None:
    assert reasons(SPACE, lambda *values: []) == []
    assert reasons_to_fail(SPACE, []) == ()


def test_without_a_search_every_reason_is_everywhere() -> None:
    (reason,) = reasons([], lambda: ["x"])
    assert (reason.num_points, reason.share, reason.everywhere, str(reason)) == (
        1,
        1.0,
        True,
        "the one point",
    )


def test_reasons_are_told_apart_and_the_most_frequent_first() -> None:
    def codes(stage: int, micro: int, batch: int) -> list[str]:
        return ["few"] * (stage == 3) + ["many", "many"] * (micro > 4)

    many, few = reasons(SPACE, codes)
    assert (many.code, many.key, many.num_points) == ("many", "k", 24)
    assert (few.code, few.num_points) == ("few", 9)
    assert str(many) == "all 24 points with micro = 8 or 16"
    assert many.problem.message == "is many"


def test_warnings_are_counted_the_same_way() -> None:
    found = verdicts(every(SPACE), lambda stage, micro, batch: ["w"] * (stage == 0), warn=True)
    assert reasons_to_fail(SPACE, found) == ()
    (reason,) = reasons_to_warn(SPACE, found)
    assert str(reason) == "all 9 points with stage = 0"


def test_a_share_is_of_the_sample() -> None:
    """The corners, which are looked at beside it, say nothing of how much of the space fails."""
    (axis,) = axes(a=[0, 1, 2, 3, 4])
    points = [Point((value,), {}, value not in (0, 4)) for value in range(5)]
    (reason,) = reasons_to_fail([axis], verdicts(points, lambda value: ["x"] * (value != 1)))
    assert (reason.num_points, reason.share) == (4, 2 / 3)
    (corner,) = reasons_to_fail([axis], verdicts(points, lambda value: ["x"] * (value == 4)))
    assert (corner.num_points, corner.share) == (1, 0)


def test_many_numbers_are_told_as_a_range() -> None:
    spec = {"type": "double", "minval": 0, "maxval": 1}
    axis = Axis(path=("lr",), spec=spec)
    points = [Point((number / 100,), {}) for number in range(100)]
    (reason,) = reasons_to_fail([axis], verdicts(points, lambda lr: ["x"] * (lr >= 0.5)))
    assert str(reason) == "all 50 points with lr from 0.5 to 0.99"
    (few,) = reasons_to_fail([axis], verdicts(points, lambda lr: ["x"] * (lr > 0.975)))
    assert str(few) == "all 2 points with lr = 0.98 or 0.99"


def test_values_are_told_as_they_are() -> None:
    space = axes(a=[1, True, 1.0, "1", None, [1], {"b": 1}, *"stuvwxyz"])
    (reason,) = reasons(space, lambda value: ["x"] * (value is True))
    assert str(reason) == "the one point with a = True"
    (most,) = reasons(space, lambda value: ["x"] * (value != "z"))
    assert str(most) == "all 14 points with a other than z"


def test_holes_are_not_told_over() -> None:
    (axis,) = [Axis(path=("n",), spec={"type": "int", "minval": 1, "maxval": 40})]
    points = [Point((number,), {}) for number in range(1, 41)]
    (odd,) = reasons_to_fail([axis], verdicts(points, lambda n: ["x"] * (n % 2)))
    assert str(odd) == "all 20 points with n = 1, 3, 5, 7, 9, 11 or 14 more values"
    (most,) = reasons_to_fail([axis], verdicts(points, lambda n: ["x"] * (n % 8 > 0)))
    assert str(most) == "all 35 points with n other than 8, 16, 24, 32 or 40"


GRIDS = st.lists(st.integers(1, 4), min_size=0, max_size=3)


@given(GRIDS, st.data())
def test_what_is_told_adds_up(sizes: list[int], data: st.DataObject) -> None:
    space = axes(**{f"a{index}": list(range(size)) for index, size in enumerate(sizes)})
    points = every(space)
    codes = {
        point.values: data.draw(st.lists(st.sampled_from("xyz"), unique=True, max_size=2)) for point in points
    }
    found = reasons(space, lambda *values: codes[values])
    assert {reason.code for reason in found} == {code for names in codes.values() for code in names}
    for reason in found:
        members = {values for values, names in codes.items() if reason.code in names}
        assert reason.num_points == len(members)
        assert reason.share == len(members) / len(points)
        assert reason.example.values in members
        held = {
            point.values for point in points if any(inside(where, space, point) for where in reason.where)
        }
        if not reason.where:
            held = {point.values for point in points}
        assert members <= held
        assert reason.only == (members == held)
        assert not reason.everywhere or reason.share == 1


def inside(where: Region, space: list[Axis], point: Point) -> bool:
    pairs = zip(where.axes, where.values, strict=True)
    return all(point.values[space.index(axis)] in values for axis, values in pairs)
