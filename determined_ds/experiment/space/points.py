"""The points of a search space to check: all of them, or the corners and a sample."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from determined_ds.experiment.space.master_random import MasterRandom
from determined_ds.experiment.space.space import Axis, SearchSpace

LIMIT = 100_000
SAMPLE = 200
GRID_SAMPLE = 10_000
MOST_CORNERS = 4_096


class Point(NamedTuple):
    """One choice of a search.

    Args:
        values: One for each axis of the space.
        hyperparameters: All of them, as a plain mapping. It shares what it has in common with other points, so
            it is there to be read.
        drawn: Whether it counts for a share of the space; a corner of a space that is only sampled does not.
    """

    values: tuple[Any, ...]
    hyperparameters: dict[str, Any]
    drawn: bool = True


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of a space, made one by one as they are asked for.

    Args:
        space: Where they are from.
        exact: Whether these are all points that the search can visit.
        corners: Values of the corners to check beside a sample; none where the points are exact.
        sample: Values of a sample; none where the points are exact.
    """

    space: SearchSpace
    exact: bool
    corners: Sequence[tuple[Any, ...]] = ()
    sample: Sequence[tuple[Any, ...]] = ()

    def __len__(self) -> int:
        size = self.space.size
        return size if self.exact and size is not None else len(self.corners) + len(self.sample)

    def __iter__(self) -> Iterator[Point]:
        at = self.space.at
        if self.exact:
            for values in itertools.product(*map(_values, self.space.axes)):
                yield Point(values, at(values))
            return
        for values in self.sample:
            yield Point(values, at(values))
        for values in self.corners:
            yield Point(values, at(values), False)


def points_of(
    space: SearchSpace,
    *,
    limit: int = LIMIT,
    sample: int = SAMPLE,
    grid_sample: int = GRID_SAMPLE,
    most_corners: int = MOST_CORNERS,
    seed: int | None = None,
) -> Points:
    """The points of a space to check.

    A finite space of up to ``limit`` points is given whole, in the order in which the master lays out a grid
    (it runs a grid from its end). Of a larger grid a sample without repetition is given, and of any other space
    a sample as the master draws its trials; both with the corners.

    Where the experiment states its seed, such a sample begins with exactly the trials that the search will create;
    unless a mapping in the hyperparameters holds two axes or more, which the master draws in no certain order
    (:attr:`SearchSpace.unordered`).

    Args:
        space: See :func:`determined_ds.experiment.space.space.read_space`.
        limit: Points up to which a finite space is given whole.
        sample: Points to draw of a space that is not a grid.
        grid_sample: Points to draw of a grid.
        most_corners: Combinations of corners up to which all are given; of more, a few in which each corner
            of each axis occurs.
        seed: Of the sample; the experiment's if None.
    """
    seed = space.seed if seed is None else seed
    size = space.size
    if size is not None and size <= limit:
        return Points(space=space, exact=True)
    if size is not None and space.searcher == "grid":
        indices = _sampled(size, grid_sample, seed)
        drawn = [_nth(space.axes, index) for index in indices]
        known = {repr(values) for values in drawn}
        corners = [values for values in _corners(space.axes, most_corners) if repr(values) not in known]
        return Points(space=space, exact=False, corners=corners, sample=drawn)
    return Points(
        space=space,
        exact=False,
        corners=list(_corners(space.axes, most_corners)),
        sample=list(_drawn(space.axes, sample, seed)),
    )


def _values(axis: Axis) -> list[Any]:
    assert axis.num_values is not None
    return [axis.value(index) for index in range(axis.num_values)]


def _nth(axes: Sequence[Axis], index: int) -> tuple[Any, ...]:
    """The values of the n-th point of a grid, the last axis being the fastest."""
    values = []
    for axis in reversed(axes):
        assert axis.num_values is not None
        index, here = divmod(index, axis.num_values)
        values.append(axis.value(here))
    return tuple(reversed(values))


def _sampled(size: int, count: int, seed: int) -> list[int]:
    """``count`` different numbers below ``size``, in order; a size may be more than a ``range`` can count."""
    source = random.Random(seed)
    count = min(count, size)
    if 2 * count > size:
        return sorted(source.sample(range(size), count))
    chosen: set[int] = set()
    while len(chosen) < count:
        chosen.add(source.randrange(size))
    return sorted(chosen)


def _drawn(axes: Sequence[Axis], count: int, seed: int) -> Iterator[tuple[Any, ...]]:
    source = MasterRandom(seed)
    for _ in range(count):
        yield tuple(axis.draw(source) for axis in axes)
        source.create()


def _corners(axes: Sequence[Axis], most: int) -> Iterator[tuple[Any, ...]]:
    corners = [axis.corners for axis in axes]
    if math.prod(map(len, corners)) <= most:
        yield from itertools.product(*corners)
        return
    rows = max(map(len, corners))
    for row in range(rows):
        yield tuple(values[row % len(values)] for values in corners)
    if any((rows - 1) % len(values) != len(values) - 1 for values in corners):  # all at their last
        yield tuple(values[-1] for values in corners)
