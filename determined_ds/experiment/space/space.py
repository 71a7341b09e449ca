"""The hyperparameters of an experiment -> the space that a search of Determined's visits.

Source: ``newHyperparameterGrid`` and ``getGridAxes`` in determined 0.38.1's ``master/pkg/searcher/grid.go``;
``sampleAll`` and ``sampleOne`` in ``hyperparameters.go`` there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from determined_ds.documents.document import KeyPath, dotted, one_of
from determined_ds.documents.values import Findings
from determined_ds.experiment.space.go_power import go_power
from determined_ds.experiment.space.master_random import LARGEST_UNIT, MasterRandom, uniform

# A hyperparameter's type -> its fields (schemas expconf/v0/hyperparameter-*.json); all but count are required.
SPEC_FIELDS = {
    "categorical": ("vals",),
    "const": ("val",),
    "double": ("minval", "maxval", "count"),
    "int": ("minval", "maxval", "count"),
    "log": ("minval", "maxval", "base", "count"),
}
SPEC_TYPES = tuple(SPEC_FIELDS)
NO_SPEC = (KeyError, TypeError, ValueError, IndexError, ArithmeticError)
LARGEST_WHOLE = (
    1e21  # from here on Go's JSON writes a whole number with an exponent, which is read as a float
)


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
        """One of the ``num_values``, in the master's order.

        A grid's values of a range are even, ends included; a single one is in the middle. Integers are rounded
        half away from zero.
        """
        count, low, high = self.num_values, self.spec.get("minval"), self.spec.get("maxval")
        assert count is not None
        assert 0 <= index < count
        if self.kind == "categorical":
            return self.spec["vals"][index]
        assert low is not None
        assert high is not None
        if self.kind == "int" and not self.in_grid:
            return low + index
        if self.kind == "int":
            return _rounded((low + high) / 2 if count == 1 else low + index * (high - low) / (count - 1))
        low, high = float(low), float(high)
        return self._of_range((low + high) / 2 if count == 1 else low + index * (high - low) / (count - 1))

    @cached_property
    def corners(self) -> tuple[Any, ...]:
        """Each category; the two ends of a range, as far out as the searcher goes.

        Where it draws from a continuous range that is ``minval`` and the last number before ``maxval``.
        """
        count = self.num_values
        if self.kind == "categorical":
            return tuple(self.spec["vals"])
        if count is not None:
            return tuple(self.value(index) for index in sorted({0, count - 1}))
        low, high = self.spec["minval"], self.spec["maxval"]
        if self.kind == "int":  # of a grid that lacks the count
            return low, high
        return self._of_range(low), self._of_range(uniform(low, high, LARGEST_UNIT))

    @cached_property
    def middle(self) -> Any:
        return middle_of(self.spec)

    def draw(self, random: MasterRandom) -> Any:
        """A value as ``sampleOne`` draws it."""
        if self.kind == "categorical":
            return self.spec["vals"][random.below(len(self.spec["vals"]))]
        low, high = self.spec["minval"], self.spec["maxval"]
        if self.kind == "int":
            return low + random.below(high - low + 1)
        return self._of_range(random.uniform(low, high))

    def _of_range(self, number: float) -> float | int:
        """A value of a continuous range as the trial gets it: JSON of Go's, where 8.0 is written 8."""
        value = go_power(float(self.spec["base"]), float(number)) if self.kind == "log" else float(number)
        if not math.isfinite(value):
            raise OverflowError("a hyperparameter must be finite")
        return int(value) if value.is_integer() and abs(value) < LARGEST_WHOLE else value


def _rounded(number: float) -> int:
    whole = math.trunc(number)
    return whole + (number > 0) - (number < 0) if abs(number - whole) >= 0.5 else whole


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
    constants: dict[str, Any]
    seed: int = 0

    @cached_property
    def size(self) -> int | None:
        """The number of points that a search can visit; None where an axis is continuous."""
        counts = [axis.num_values for axis in self.axes]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def at(self, values: Sequence[Any]) -> dict[str, Any]:
        """The hyperparameters of one point.

        Args:
            values: One for each axis.

        Returns:
            A mapping that shares with all others what they have in common. It is there to be read.
        """
        return _filled(self.constants, self._steps, values)

    @cached_property
    def unordered(self) -> dict[str, tuple[Axis, ...]]:
        """Top-level hyperparameter -> the axes below it that a master draws in no certain order, two or more of them.

        Top-level names are drawn in their order; of a mapping the order is that of a Go map, which changes from one
        draw to the next. A grid draws nothing, and a list of one value takes no number.

        Source: ``sampleAll`` and ``sampleOne`` in determined 0.38.1's ``master/pkg/searcher/hyperparameters.go``.
        """
        below: dict[str, list[Axis]] = {}
        for axis in self.axes if self.searcher != "grid" else ():
            if axis.num_values != 1:
                below.setdefault(str(axis.path[0]), []).append(axis)
        return {name: tuple(axes) for name, axes in below.items() if len(axes) > 1}

    @cached_property
    def middle(self) -> dict[str, Any]:
        """The point in the middle, to be tried without a search."""
        return self.at([axis.middle for axis in self.axes])

    @cached_property
    def _steps(self) -> dict[Any, Any]:
        """The axes as a tree: key -> index of the axis, or the tree below it."""
        tree: dict[Any, Any] = {}
        for index, axis in enumerate(self.axes):
            node = tree
            for step in axis.path[:-1]:
                node = node.setdefault(step, {})
            node[axis.path[-1]] = index
        return tree


def _filled(constants: dict[str, Any], steps: dict[Any, Any], values: Sequence[Any]) -> dict[str, Any]:
    made = dict(constants)
    for key, below in steps.items():
        made[key] = _filled(constants[key], below, values) if isinstance(below, dict) else values[below]
    return made


def read_space(
    found: Findings, hyperparameters: dict[str, Any], *, searcher: str, seed: int = 0
) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space of the hyperparameters of an experiment.

    Args:
        found: Gets a problem for each invalid spec, and the paths of constants.
        hyperparameters: As they stand in the experiment.
        searcher: ``searcher.name``.
        seed: ``reproducibility.experiment_seed``.

    Returns:
        The space, and the dotted names of what is searched, in the order of the text.
    """
    axes: list[Axis] = []
    root = "hyperparameters"
    constants = {
        key: _read(found, (root, key), value, axes, searcher == "grid")
        for key, value in hyperparameters.items()
    }
    searched = tuple(found.document.key((root, *axis.path)) for axis in axes)
    in_order = tuple(sorted(axes, key=lambda axis: tuple(map(str, axis.path))))
    return SearchSpace(searcher=searcher, axes=in_order, constants=constants, seed=seed), searched


def _read(found: Findings, path: KeyPath, value: Any, axes: list[Axis], in_grid: bool) -> Any:
    """What stands at ``path`` at every point; None where that is an axis."""
    if not isinstance(value, dict):
        return value
    if "type" not in value:
        return {key: _read(found, (*path, key), item, axes, in_grid) for key, item in value.items()}
    kind = value["type"]
    if kind not in SPEC_TYPES:
        found.add(path, *invalid_spec(value), "hyperparameter-spec")
        return None
    surplus = [key for key in value if key not in ("type", *SPEC_FIELDS[kind])]
    if surplus:
        message = f"a {kind} hyperparameter has no field {', '.join(surplus)}"
        found.add(path, message, _spec_form(kind), "hyperparameter-spec")
        return None
    if kind == "const" and "val" in value:
        found.constants.append(path)
        return value["val"]
    axis = Axis(path=path[1:], spec=value, in_grid=in_grid)
    try:
        middle_of(value)
        _ = _checked_count(value), axis.corners
    except NO_SPEC:
        found.add(path, f"is not a complete {kind} hyperparameter", _spec_form(kind), "hyperparameter-spec")
    else:
        axes.append(axis)
    return None


def _checked_count(spec: dict[str, Any]) -> int | None:
    count = spec.get("count")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ValueError("count must be an integer above 0")
    return count


def invalid_spec(value: Mapping[str, Any]) -> tuple[str, str]:
    """Message and fix of a mapping whose ``type`` is not one of Determined's."""
    kind = value["type"] if isinstance(value["type"], str) else ""
    if value.keys() & {field for fields in SPEC_FIELDS.values() for field in fields}:
        return "has a type that no hyperparameter has", one_of(SPEC_TYPES, kind)
    return (
        "a mapping with a key `type` is read by Determined as a hyperparameter to search",
        "wrap the whole hyperparameter: {type: const, val: {...}}, or keep a DeepSpeed JSON in a file",
    )


def _spec_form(kind: str) -> str:
    if kind == "const":
        return "write {type: const, val: ...}"
    if kind == "categorical":
        return "write {type: categorical, vals: [...]}"
    base = ", base: 10" if kind == "log" else ""
    return f"write {{type: {kind}, minval: ..., maxval: ...{base}}} with minval < maxval"


def middle_of(spec: Mapping[str, Any]) -> Any:
    """The value in the middle of a hyperparameter's range; the first of a list; a constant's own.

    A ``log`` hyperparameter ranges over base**minval .. base**maxval.

    Raises:
        KeyError, TypeError, ValueError, IndexError, ArithmeticError: it is not a complete hyperparameter.
    """
    if spec["type"] == "const":
        return spec["val"]
    if spec["type"] == "categorical":
        if not isinstance(spec["vals"], list):
            raise TypeError("vals must be a list")
        return spec["vals"][0]
    low, high = spec["minval"], spec["maxval"]
    kinds = (int,) if spec["type"] == "int" else (int, float)
    if any(isinstance(bound, bool) or not isinstance(bound, kinds) for bound in (low, high)):
        raise TypeError("bounds must be numbers")
    if not low < high:
        raise ValueError("minval must be below maxval")
    if spec["type"] == "int":
        return (low + high) // 2
    middle = (low + high) / 2
    if spec["type"] == "double":
        return float(middle)
    if isinstance(spec["base"], bool) or spec["base"] <= 0:
        raise ValueError("base must be above 0")
    return float(spec["base"] ** middle)
