"""Every point of a search space judged, at the price of the different ones.

Of a point :func:`determined_ds.config.resolve.resolve` reads some hyperparameters and not others, the model's own
among them. What it read is recorded; another point that has the same there has the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where, resolve
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import on_slots_of
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space.points import Point

Check = Callable[[Document, ResolvedConfig | None], Iterable[Problem]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is told of some points.

    Args:
        problems: Why they do not run; none where they do.
        warnings: What is possible, but probably not meant so.
        points: One or more.
        resolved: What the first of them runs with; None where it does not run.
    """

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    points: tuple[Point, ...]
    resolved: ResolvedConfig | None


def judge_points(
    experiment: Experiment,
    points: Iterable[Point],
    where: Where,
    *,
    check: Check | None = None,
) -> list[Verdict]:
    """Judge points of an experiment's space, each as ``resolve`` would.

    Args:
        experiment: Whose space they are of.
        points: See :func:`determined_ds.experiment.space.points.points_of`.
        where: Where they would train.
        check: More that may be wrong with a point. It must read a hyperparameter each time that it needs it.

    Returns:
        A verdict for all points of which the same is told, in the order of their first points.
    """
    where = on_slots_of(experiment, where)
    opened: dict[tuple[str, ...], _Open] = {}
    known = _Known([axis.path[0] for axis in experiment.space.axes])
    for point in points:
        codes = [repr(value) for value in point.values]  # 1, 1.0 and true are equal, and not the same
        verdict = known.get(codes)
        if verdict is None:
            recorder = ReadRecorder(point.hyperparameters)
            found = _judged(experiment.at(recorder), where, check)
            verdict = opened.setdefault(found.told, found)
            known.put(codes, recorder.read, verdict)
        verdict.points.append(point)
    return [
        Verdict(
            problems=verdict.problems,
            warnings=verdict.warnings,
            points=tuple(verdict.points),
            resolved=verdict.resolved,
        )
        for verdict in opened.values()
    ]


class _Open(NamedTuple):
    """A verdict that may get more points."""

    resolved: ResolvedConfig | None
    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    points: list[Point]

    @property
    def told(self) -> tuple[str, ...]:
        """What makes it the same as another."""
        found = [f"{problem.code} {problem}" for problem in (*self.problems, *self.warnings)]
        return (str(len(self.problems)), *found)


def _judged(hyperparameters: Document, where: Where, check: Check | None) -> _Open:
    resolved: ResolvedConfig | None = None
    problems: list[Problem] = []
    warnings: tuple[Problem, ...] = ()
    try:
        resolved = resolve(hyperparameters, where)
        warnings = resolved.warnings
    except ConfigError as error:
        problems += error.problems
        warnings = error.warnings
    if check is not None:
        problems += check(hyperparameters, resolved)
    if problems or resolved is None:
        return _Open(None, tuple(problems), warnings, [])
    return _Open(resolved, (), warnings, [])


class _Known:
    """The verdicts by what was read to reach them.

    A point that agrees with another in all that was read of the other is read just so, and judged so.

    Args:
        names: Of each axis, the hyperparameter that it is part of.
    """

    def __init__(self, names: list[str | int]) -> None:
        self._names = names
        self._tables: dict[tuple[int, ...], dict[tuple[str, ...], _Open]] = {}

    def get(self, codes: list[str]) -> _Open | None:
        for axes, table in self._tables.items():
            verdict = table.get(tuple([codes[axis] for axis in axes]))
            if verdict is not None:
                return verdict
        return None

    def put(self, codes: list[str], read: set[str], verdict: _Open) -> None:
        axes = tuple(axis for axis, name in enumerate(self._names) if name in read)
        self._tables.setdefault(axes, {})[tuple([codes[axis] for axis in axes])] = verdict


class ReadRecorder(dict[str, Any]):
    """A mapping that knows which of its values have been read. Its keys may be looked at freely."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:  # so that a copy reads each value by its key
        return super().__iter__()

    def _all(self, name: str) -> Any:
        self.read.update(self.keys())
        return getattr(super(), name)

    def items(self) -> Any:
        return self._all("items")()

    def values(self) -> Any:
        return self._all("values")()

    def copy(self) -> Any:
        return self._all("copy")()

    def setdefault(self, *args: Any) -> Any:
        return self._all("setdefault")(*args)

    def pop(self, *args: Any) -> Any:
        return self._all("pop")(*args)

    def popitem(self) -> Any:
        return self._all("popitem")()

    def __eq__(self, other: object) -> bool:
        return bool(self._all("__eq__")(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return str(self._all("__repr__")())

    def __or__(self, other: Any) -> Any:
        return self._all("__or__")(other)

    __hash__ = None
