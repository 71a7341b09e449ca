"""The space of a hyperparameter search: what a master of Determined visits, and how it draws.

The way of a value::

    hyperparameters -> read_space() -> SearchSpace (axes) -> points_of(): all points, or a sample and the corners

Source: determined 0.38.1's ``master/pkg/searcher`` (``grid.go``, ``hyperparameters.go``, ``actions.go``) and
``master/pkg/nprand``. A ``log`` hyperparameter is computed by Python's power, which may differ from Go's in the last
digit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.errors import Problem

if TYPE_CHECKING:
    from numpy.random import RandomState

LARGEST_UNIT = (2**53 - 1) / 2**53  # the last number below 1 that is drawn
LARGEST_WHOLE = 1e21  # from here on Go writes a whole number with an exponent, which is read as a float
MOST_POINTS = 1_000
MOST_CORNERS = 256
CONTINUOUS_SAMPLE = 200  # each may need a decision of its own
AXES = ("categorical", "double", "int", "log")  # types of hyperparameters that are searched
HYPERPARAMETERS: KeyPath = ("hyperparameters",)
HALVING = ("adaptive_asha", "async_halving")


def master_random(seed: int) -> RandomState:
    """The generator that a master draws trials from, given ``reproducibility.experiment_seed``, of 32 bits."""
    from numpy.random import RandomState  # late: most commands draw nothing

    return RandomState(seed & 0xFFFFFFFF)


def draw_trial_seed(source: RandomState) -> int:
    """The seed of a trial, drawn after its hyperparameters and the 16 bytes of its request id."""
    source.bytes(16)
    return int(source.randint(2**31, dtype="uint64"))


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One hyperparameter that is searched.

    Args:
        path: Below ``hyperparameters``.
        spec: As written: ``{type: ..., ...}``, of one of the types in :data:`AXES`; a master's schema takes it.
        in_grid: Whether the searcher is ``grid``, which visits ``count`` values of a range.
    """

    path: KeyPath
    spec: Mapping[str, Any]
    in_grid: bool = False

    @property
    def name(self) -> str:
        """Dotted name below ``hyperparameters``."""
        return dotted(self.path)

    @property
    def kind(self) -> str:
        return str(self.spec["type"])

    @cached_property
    def num_values(self) -> int | None:
        """How many values the searcher can give it; None where they are numbers of a continuous range."""
        if self.kind == "categorical":
            return len(self.spec["vals"])
        count: int | None = self.spec.get("count") if self.in_grid else None
        if self.kind != "int":
            return count
        every: int = self.spec["maxval"] - self.spec["minval"] + 1
        return min(count or every, every)

    def value(self, index: int) -> Any:
        """One of the ``num_values``, in the master's order. Of a range a grid takes even steps, or the middle."""
        if self.kind == "categorical":
            return self.spec["vals"][index]
        count, low, high = self.num_values, self.spec["minval"], self.spec["maxval"]
        assert count is not None
        if self.kind == "int" and count == high - low + 1:
            return low + index
        number = (low + high) / 2 if count == 1 else low + index * (high - low) / (count - 1)
        if self.kind != "int":
            return self._of_range(number)
        whole = math.trunc(number)  # halves are rounded away from zero
        return whole + (number > 0) - (number < 0) if abs(number - whole) >= 0.5 else whole

    @cached_property
    def corners(self) -> tuple[Any, ...]:
        """Each category; the two ends of a range, as far out as the searcher goes."""
        if self.num_values is None:
            return self._between(0), self._between(LARGEST_UNIT)
        taken = range(self.num_values) if self.kind == "categorical" else sorted({0, self.num_values - 1})
        return tuple(self.value(index) for index in taken)

    @property
    def middle(self) -> Any:
        """The first category; the middle of a range."""
        if self.kind == "categorical":
            return self.spec["vals"][0]
        if self.kind == "int":
            return (self.spec["minval"] + self.spec["maxval"]) // 2
        return self._between(0.5)

    def draw(self, source: RandomState) -> Any:
        """A value as a master draws it; of a grid, which it does not draw, any of its values."""
        if self.num_values is not None:
            return self.value(int(source.randint(self.num_values, dtype="uint64")))
        return self._between(float(source.random_sample()))

    def refusal(self) -> tuple[str, str] | None:
        """Message and fix of what a master's schema takes and a master cannot draw."""
        if self.kind == "categorical":
            return None if self.spec["vals"] else ("has no values", "write some in vals")
        whole = [self.spec.get("count") or 1]
        whole += [self.spec["minval"], self.spec["maxval"]] if self.kind == "int" else []
        if not all(isinstance(number, int) and abs(number) < 2**63 for number in whole):
            return "needs integers of 64 bits", "write them without a dot, and smaller than 2**63"
        try:
            _ = self.middle, self.corners
        except OverflowError:
            return "has values that are not finite", "write bounds that are nearer to each other"
        return None

    def _between(self, share: float) -> float | int:
        """The value at a share of a continuous range."""
        low, high = self.spec["minval"], self.spec["maxval"]
        return self._of_range(low + (high - low) * share)

    def _of_range(self, number: float) -> float | int:
        """A value of a continuous range as the trial gets it: JSON of Go's, where 8.0 is written 8."""
        value = float(self.spec["base"]) ** float(number) if self.kind == "log" else float(number)
        if not math.isfinite(value):
            raise OverflowError("a hyperparameter must be finite")
        return int(value) if value.is_integer() and abs(value) < LARGEST_WHOLE else value


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What a search chooses its points from.

    Args:
        searcher: ``single``, ``random``, ``grid``, ``adaptive_asha`` or ``async_halving``.
        axes: What is searched, in the master's order: by name, mapping by mapping.
        constants: The hyperparameters with constants unwrapped, and None where there is an axis.
        seed: ``reproducibility.experiment_seed``.
    """

    searcher: str
    axes: tuple[Axis, ...]
    constants: Document
    seed: int = 0

    @cached_property
    def size(self) -> int | None:
        """The number of points that a search can visit; None where an axis is continuous."""
        counts = [axis.num_values for axis in self.axes]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def at(self, values: Sequence[Any]) -> dict[str, Any]:
        """The hyperparameters of one point, given a value for each axis.

        The mapping shares with those of other points what they have in common: it is there to be read.
        """
        made: dict[Any, Any] = dict(self.constants.data)
        for axis, value in zip(self.axes, values, strict=True):
            section = made
            for step in axis.path[:-1]:
                below = section[step] = dict(section[step])
                section = below
            section[axis.path[-1]] = value
        return made


def read_space(
    document: Document, *, searcher: str, seed: int = 0, refused: Iterable[KeyPath] = ()
) -> tuple[SearchSpace, list[Problem]]:
    """The space of an experiment's hyperparameters, and a problem for each that a master takes and cannot draw.

    A hyperparameter in which Determined's schema refuses something, by the paths of ``refused``, is left out.
    """
    if not isinstance(document.get(HYPERPARAMETERS), dict):
        document = document.holding({"hyperparameters": {}})
    stated = document.sub(HYPERPARAMETERS)
    within = {path[:end] for path in refused for end in range(2, len(path))}
    axes: list[Axis] = []
    wrapped: list[KeyPath] = []
    problems: list[Problem] = []

    def read(path: KeyPath, value: Any) -> Any:
        """What stands at a path at every point; None where that is an axis."""
        if not isinstance(value, dict):
            return value
        if "type" not in value:
            return {key: read((*path, key), item) for key, item in value.items()}
        if value["type"] == "const" and "val" in value:
            wrapped.append((*HYPERPARAMETERS, *path))
            return value["val"]
        if value["type"] in AXES and ("hyperparameters", *path) not in within:
            axis = Axis(path=path, spec=value, in_grid=searcher == "grid")
            if found := axis.refusal():
                problems.append(stated.problem(path, *found, "hyperparameter-spec"))
            else:
                axes.append(axis)
        return None

    def unwrapped(path: KeyPath) -> KeyPath:
        """The path of what stands within ``{type: const, val: ...}``, without the ``val``."""
        outer = next((each for each in wrapped if path[: len(each)] == each), path)
        return path if len(path) < len(outer) + 2 else (*outer, *path[len(outer) + 1 :])

    constants = {name: read((name,), value) for name, value in stated.data.items()}
    places = {unwrapped(path): place for path, place in stated.places.items()}
    overwrites = {unwrapped(path): origin for path, origin in stated.overwrites.items()}
    stated = replace(stated, data=constants, places=places, overwrites=overwrites)
    axes.sort(key=lambda axis: tuple(map(str, axis.path)))
    return SearchSpace(searcher=searcher, axes=tuple(axes), constants=stated, seed=seed), problems


def odd_exponents(space: SearchSpace) -> list[Problem]:
    """A warning for each ``log`` hyperparameter whose bounds look like its values: they are exponents of the base."""
    found = []
    for axis in space.axes:
        if axis.kind != "log" or axis.spec["base"] <= 1:
            continue
        base, low, high = (float(axis.spec[key]) for key in ("base", "minval", "maxval"))
        if 0 < low < high <= 1:
            fix = f"write minval: {math.log(low, base):.4g}, maxval: {math.log(high, base):.4g}"
            message = f"are exponents of the base: values from {base**low:g} to {base**high:g} are drawn"
            found.append(
                space.constants.problem(axis.path, message, fix, "log-bounds", value=dict(axis.spec))
            )
    return found


def points_of(space: SearchSpace) -> list[tuple[Any, ...]]:
    """The points of a space to check, a value for each axis: all of up to 1,000, else a sample and the corners.

    All points come in the order in which a master lays out a grid (it runs it from its end). A sample is drawn as a
    master draws its trials: it begins with those that the search will create, unless a mapping in the hyperparameters
    holds several axes, which a master draws in no fixed order.
    """
    axes, size = space.axes, space.size
    if size is not None and size <= MOST_POINTS:
        every = [[axis.value(index) for index in range(axis.num_values or 0)] for axis in axes]
        return [*itertools.product(*every)]
    corners = [*itertools.islice(itertools.product(*(axis.corners for axis in axes)), MOST_CORNERS)]
    source = master_random(space.seed)
    drawn: dict[str, tuple[Any, ...]] = {}
    for _ in range(CONTINUOUS_SAMPLE if size is None else MOST_POINTS - len(corners)):
        values = tuple([axis.draw(source) for axis in axes])
        drawn.setdefault(repr(values), values)
        draw_trial_seed(source)
    return [*{**drawn, **{repr(values): values for values in corners}}.values()]
