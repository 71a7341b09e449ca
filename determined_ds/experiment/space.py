"""The space of a hyperparameter search: what a master of Determined visits, how it draws, and when it judges.

The way of a value::

    hyperparameters -> read_space() -> SearchSpace (axes) -> points_of(): all points, or a sample and the corners

Source: determined 0.38.1's ``master/pkg/searcher`` (``grid.go``, ``hyperparameters.go``, ``actions.go``,
``asha_stopping.go``, ``adaptive_asha.go``) and ``master/pkg/nprand``. A ``log`` hyperparameter is computed by Python's
power, which may differ from Go's in the last digit.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from determined_ds.documents.document import Document, KeyPath, dotted, one_of
from determined_ds.errors import Problem

LARGEST_UNIT = (2**53 - 1) / 2**53  # the last number below 1 that is drawn
LARGEST_WHOLE = 1e21  # from here on Go writes a whole number with an exponent, which is read as a float
MOST_POINTS = 5_000
MOST_CORNERS = 1_024
CONTINUOUS_SAMPLE = 200  # each may need a decision of its own
# Type of a hyperparameter -> its fields (schemas expconf/v0/hyperparameter-*.json); all but count are required.
SPEC_FIELDS = {
    "categorical": ("vals",),
    "const": ("val",),
    "double": ("minval", "maxval", "count"),
    "int": ("minval", "maxval", "count"),
    "log": ("minval", "maxval", "base", "count"),
}
NOT_A_SPEC = (KeyError, TypeError, ValueError, IndexError, ArithmeticError)
HALVING = ("adaptive_asha", "async_halving")
DIVISOR, MAX_RUNGS, MODE = 4.0, 5, "standard"  # where a searcher states none


class MasterRandom:
    """The generator that a master draws trials from, which is numpy's ``RandomState``.

    Args:
        seed: ``reproducibility.experiment_seed``, 32 bits.
    """

    def __init__(self, seed: int) -> None:
        from numpy.random import RandomState  # late: most commands draw nothing

        self._state = RandomState(seed & 0xFFFFFFFF)

    def below(self, count: int) -> int:
        """An integer in [0, count)."""
        return int(self._state.randint(count, dtype="uint64")) if count > 1 else 0  # of one nothing is drawn

    def uniform(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * float(self._state.random_sample())

    def trial_seed(self) -> int:
        """The seed of a trial, drawn after its hyperparameters and the 16 bytes of its request id."""
        self._state.bytes(16)
        return self.below(2**31)


def first_trial_seed(experiment_seed: int) -> int:
    """The seed of an experiment's first trial, where all hyperparameters are constants."""
    return MasterRandom(experiment_seed).trial_seed()


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One hyperparameter that is searched.

    Args:
        path: Below ``hyperparameters``.
        spec: As written: ``{type: ..., ...}``; complete, and of another type than const.
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
        every = self.spec["maxval"] - self.spec["minval"] + 1 if self.kind == "int" else None
        if not self.in_grid:
            return every
        count: int | None = self.spec.get("count")
        return min(count, every) if count is not None and every is not None else count

    def value(self, index: int) -> Any:
        """One of the ``num_values``, in the master's order. Of a range a grid takes even steps, or the middle."""
        if self.kind == "categorical":
            return self.spec["vals"][index]
        count, low, high = self.num_values, self.spec["minval"], self.spec["maxval"]
        assert count is not None
        if self.kind == "int" and not self.in_grid:
            return low + index
        if self.kind != "int":
            low, high = float(low), float(high)
        number = (low + high) / 2 if count == 1 else low + index * (high - low) / (count - 1)
        if self.kind != "int":
            return self._of_range(number)
        whole = math.trunc(number)  # halves are rounded away from zero
        return whole + (number > 0) - (number < 0) if abs(number - whole) >= 0.5 else whole

    @cached_property
    def corners(self) -> tuple[Any, ...]:
        """Each category; the two ends of a range, as far out as the searcher goes."""
        if self.kind == "categorical":
            return tuple(self.spec["vals"])
        if self.num_values is not None:
            return tuple(self.value(index) for index in sorted({0, self.num_values - 1}))
        low, high = self.spec["minval"], self.spec["maxval"]
        if self.kind == "int":  # of a grid that lacks the count
            return low, high
        return self._of_range(low), self._of_range(low + (high - low) * LARGEST_UNIT)

    @cached_property
    def middle(self) -> Any:
        """The first category; the middle of a range.

        Raises:
            KeyError, TypeError, ValueError, IndexError, ArithmeticError: it is not a complete hyperparameter.
        """
        if self.kind == "categorical":
            if not isinstance(self.spec["vals"], list):
                raise TypeError("vals must be a list")
            return self.spec["vals"][0]
        low, high = self.spec["minval"], self.spec["maxval"]
        kinds = (int,) if self.kind == "int" else (int, float)
        if any(isinstance(bound, bool) or not isinstance(bound, kinds) for bound in (low, high)):
            raise TypeError("bounds must be numbers")
        if not low < high or (self.kind == "log" and not self.spec["base"] > 0):
            raise ValueError("minval must be below maxval, and base above 0")
        if self.kind == "int":
            return (low + high) // 2
        middle = (low + high) / 2
        return float(middle if self.kind == "double" else self.spec["base"] ** middle)

    def draw(self, source: MasterRandom) -> Any:
        """A value as a master draws it."""
        if self.kind == "categorical":
            return self.spec["vals"][source.below(len(self.spec["vals"]))]
        low, high = self.spec["minval"], self.spec["maxval"]
        if self.kind == "int":
            return low + source.below(high - low + 1)
        return self._of_range(source.uniform(low, high))

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
        wrapped: Paths of ``{type: const, val: ...}``, from the top of the YAML.
        searched: Dotted names of what is searched, from the top of the YAML and in the order of its text.
    """

    searcher: str
    axes: tuple[Axis, ...]
    constants: dict[str, Any]
    seed: int = 0
    wrapped: tuple[KeyPath, ...] = ()
    searched: tuple[str, ...] = ()

    @cached_property
    def size(self) -> int | None:
        """The number of points that a search can visit; None where an axis is continuous."""
        counts = [axis.num_values for axis in self.axes]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def at(self, values: Sequence[Any]) -> dict[str, Any]:
        """The hyperparameters of one point, given a value for each axis.

        The mapping shares with those of other points what they have in common: it is there to be read.
        """
        made: dict[Any, Any] = dict(self.constants)
        own = {id(made)}
        for axis, value in zip(self.axes, values, strict=True):
            node = made
            for step in axis.path[:-1]:
                if id(node[step]) not in own:
                    node[step] = dict(node[step])
                    own.add(id(node[step]))
                node = node[step]
            node[axis.path[-1]] = value
        return made

    @cached_property
    def middle(self) -> dict[str, Any]:
        """The point in the middle, to be tried without a search."""
        return self.at([axis.middle for axis in self.axes])


def read_space(document: Document, *, searcher: str, seed: int = 0) -> tuple[SearchSpace, list[Problem]]:
    """The space of an experiment's hyperparameters.

    Args:
        document: The experiment.
        searcher: ``searcher.name``.
        seed: ``reproducibility.experiment_seed``.

    Returns:
        The space, and a problem for each mapping with a ``type`` that is not a complete hyperparameter.
    """
    axes: list[Axis] = []
    wrapped: list[KeyPath] = []
    problems: list[Problem] = []

    def read(path: KeyPath, value: Any) -> Any:
        """What stands at a path at every point; None where that is an axis."""
        if not isinstance(value, dict):
            return value
        if "type" not in value:
            return {key: read((*path, key), item) for key, item in value.items()}
        message, fix = invalid_spec(value)
        if value["type"] == "const" and value.keys() == {"type", "val"}:
            wrapped.append(path)
            return value["val"]
        if value["type"] in [kind for kind in SPEC_FIELDS if kind != "const"]:
            axis = Axis(path=path[1:], spec=value, in_grid=searcher == "grid")
            try:
                _ = axis.middle, axis.corners
                axes.append(axis)
                return None
            except NOT_A_SPEC:
                message = f"is not a complete {axis.kind} hyperparameter whose values are finite"
                fix = f"give it {' and '.join(SPEC_FIELDS[axis.kind])}, minval below maxval"
        problems.append(document.problem(path, message, fix, "hyperparameter-spec"))
        return None

    stated = document.get(("hyperparameters",))
    named = stated.items() if isinstance(stated, dict) else ()
    constants = {name: read(("hyperparameters", name), value) for name, value in named}
    space = SearchSpace(
        searcher=searcher,
        axes=tuple(sorted(axes, key=lambda axis: tuple(map(str, axis.path)))),
        constants=constants,
        seed=seed,
        wrapped=tuple(wrapped),
        searched=tuple(document.key(("hyperparameters", *axis.path)) for axis in axes),
    )
    return space, problems


def invalid_spec(value: Mapping[str, Any]) -> tuple[str, str]:
    """Message and fix of a mapping whose ``type`` is not one of Determined's."""
    if value.keys() & {field for fields in SPEC_FIELDS.values() for field in fields}:
        kind = value["type"] if isinstance(value["type"], str) else ""
        return "has a type that no hyperparameter has", one_of(SPEC_FIELDS, kind)
    return (
        "a mapping with a key `type` is read by Determined as a hyperparameter to search",
        "wrap the whole hyperparameter: {type: const, val: {...}}, or keep a DeepSpeed JSON in a file",
    )


class Points(NamedTuple):
    """Points of a space.

    Args:
        values: A value for each axis, of each point.
        num_drawn: The first so many count for a share of the space; the rest are corners of one that is sampled.
        exact: Whether these are all points that the search can visit.
    """

    values: list[tuple[Any, ...]]
    num_drawn: int
    exact: bool


def points_of(space: SearchSpace, *, limit: int = MOST_POINTS) -> Points:
    """The points of a space to check: all of up to ``limit``, else a sample and the corners.

    All points, and those of a sample of a grid, come in the order in which a master lays out a grid (it runs it from
    its end). Any other sample is drawn as a master draws its trials: it begins with those that the search will create,
    unless a mapping in the hyperparameters holds several axes, which a master draws in no fixed order.
    """
    axes, size = space.axes, space.size
    counts = [axis.num_values or 0 for axis in axes]
    if size is not None and size <= limit:
        every = [[axis.value(i) for i in range(count)] for axis, count in zip(axes, counts, strict=True)]
        return Points([*itertools.product(*every)], size, True)
    ends = [axis.corners for axis in axes]
    if math.prod(map(len, ends)) <= MOST_CORNERS:
        corners = [*itertools.product(*ends)]
    else:  # a few in which each end of each axis occurs
        rows = min(max(map(len, ends)), MOST_CORNERS)
        corners = [tuple(values[row % len(values)] for values in ends) for row in range(rows)]
        corners.append(tuple(values[-1] for values in ends))
    wanted = limit - len(corners) if size is not None else CONTINUOUS_SAMPLE
    drawn: list[tuple[Any, ...]] = []
    if size is not None and space.searcher == "grid":
        source, chosen = random.Random(space.seed), set[int]()
        while len(chosen) < wanted:  # a grid may be larger than what random.sample takes
            chosen.add(source.randrange(size))
        for index in sorted(chosen):
            values = []
            for axis, count in zip(reversed(axes), reversed(counts), strict=True):  # the last is the fastest
                index, here = divmod(index, count)
                values.append(axis.value(here))
            drawn.append(tuple(reversed(values)))
    else:
        master = MasterRandom(space.seed)
        for _ in range(wanted):
            drawn.append(tuple([axis.draw(master) for axis in axes]))
            master.trial_seed()
    known = {repr(values) for values in drawn}
    return Points([*drawn, *(each for each in corners if repr(each) not in known)], len(drawn), False)


def brackets(searcher: Mapping[str, Any]) -> tuple[int, ...]:
    """Numbers of rungs of the searches that run side by side, the largest first: one for ``async_halving``.

    Args:
        searcher: The section as written, complete and of the right types.
    """
    if searcher["name"] == "async_halving":
        return (searcher["num_rungs"],)
    if searcher.get("bracket_rungs"):
        return tuple(sorted(searcher["bracket_rungs"], reverse=True))
    divisor = searcher.get("divisor") or DIVISOR
    by_size = [int(math.log(searcher[key]) / math.log(divisor)) + 1 for key in ("max_time", "max_trials")]
    most = min(searcher.get("max_rungs") or MAX_RUNGS, *by_size)
    fewest = {"conservative": 1, "standard": (most - 1) // 2 + 1, "aggressive": most}
    return tuple(range(most, fewest[searcher.get("mode") or MODE] - 1, -1))


def rungs(searcher: Mapping[str, Any]) -> tuple[int, ...]:
    """When trials are judged, in units of ``time_metric``: in the bracket of most rungs, the lowest first.

    A trial is judged at its first validation at or after a rung, and for all rungs behind it at once.

    Args:
        searcher: As for :func:`brackets`.
    """
    count, divisor = brackets(searcher)[0], searcher.get("divisor") or DIVISOR
    return tuple(max(int(searcher["max_time"] / divisor ** (count - 1 - rung)), 1) for rung in range(count))


def odd_exponents(document: Document, space: SearchSpace | None = None) -> list[Problem]:
    """A warning for each ``log`` hyperparameter whose bounds look like its values: they are exponents of the base.

    Args:
        document: The experiment, or the plain configuration that a master hands to a trial.
        space: Its space, where that has been read.
    """
    found = []
    for axis in (space or read_space(document, searcher="random")[0]).axes:
        if axis.kind != "log":
            continue
        base, low, high = (float(axis.spec[key]) for key in ("base", "minval", "maxval"))
        is_rate = bool({"lr", "learning", "decay"} & {*str(axis.path[-1]).lower().split("_")})
        if base > 1 and (0 < low < high <= 1 or (is_rate and high > 0)):
            fix = "write the exponents of the intended values"
            if 0 < low < high <= 1:
                fix += f": minval: {math.log(low, base):.4g}, maxval: {math.log(high, base):.4g}"
            elif low >= 1:
                fix += f": minval: {-high:g}, maxval: {-low:g}"
            drawn = f"values from {base**low:g} to {base**high:g} are drawn"
            message = f"minval and maxval are exponents of the base: {drawn}"
            path = ("hyperparameters", *axis.path)
            found.append(document.problem(path, message, fix, "log-bounds", value=dict(axis.spec)))
    return found
