"""Every point of a search space judged, at the cost of the distinct ones.

:func:`determined_ds.config.resolve.resolve` reads some hyperparameters of a point, and not the model's own. What it
reads is recorded; another point with the same values there has the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import on_slots_of, resolve_stated
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space.points import Point

Check = Callable[[Document, ResolvedConfig | None], Iterable[Problem]]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is wrong with some points.

    Args:
        problems: Why they do not run; none where they do.
        warnings: What is possible, but probably a mistake.
        points: One or more.
        resolved: What the first of them runs with; None where it does not run, or where its code decides that.
    """

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    points: list[Point]
    resolved: ResolvedConfig | None

    @property
    def findings(self) -> tuple[str, ...]:
        """What makes it the same verdict as another."""
        found = [f"{problem.code} {problem}" for problem in (*self.problems, *self.warnings)]
        return (str(len(self.problems)), *found)


def judge_points(
    experiment: Experiment,
    points: Iterable[Point],
    where: Where,
    *,
    check: Check | None = None,
) -> list[Judgement]:
    """Judge points of an experiment's space, each as ``resolve`` would.

    Args:
        experiment: Whose space they are of.
        points: See :func:`determined_ds.experiment.space.points.points_of`.
        where: Where they would train.
        check: Further checks of a point. It must read a hyperparameter each time that it needs it.

    Returns:
        A verdict for all points with the same findings, in the order of their first points.
    """
    where = on_slots_of(experiment, where)
    verdicts: dict[tuple[str, ...], Judgement] = {}
    known = _Known([axis.path[0] for axis in experiment.space.axes])
    for point in points:
        codes = [repr(value) for value in point.values]  # 1, 1.0 and true are equal, and not the same
        verdict = known.get(codes)
        if verdict is None:
            recorder = ReadRecorder(point.hyperparameters)
            found = _judged(experiment, experiment.at(recorder), where, check)
            verdict = verdicts.setdefault(found.findings, found)
            known.put(codes, recorder.read, verdict)
        verdict.points.append(point)
    return list(verdicts.values())


def _judged(
    experiment: Experiment, hyperparameters: Document, where: Where, check: Check | None
) -> Judgement:
    resolved: ResolvedConfig | None = None
    problems: list[Problem] = []
    warnings: tuple[Problem, ...] = ()
    try:
        resolved = resolve_stated(experiment, hyperparameters, where)
        warnings = resolved.warnings if resolved else ()
    except ConfigError as error:
        problems += error.problems
        warnings = error.warnings
    if check is not None:
        problems += check(hyperparameters, resolved)
    runs = None if problems else resolved
    return Judgement(problems=tuple(problems), warnings=warnings, points=[], resolved=runs)


class _Known:
    """The verdicts by what was read to reach them.

    A point that has the same values as another, where those of the other were read, gets the same verdict.

    Args:
        names: Of each axis, the hyperparameter that it is part of.
    """

    def __init__(self, names: list[str | int]) -> None:
        self._names = names
        self._tables: dict[tuple[int, ...], dict[tuple[str, ...], Judgement]] = {}

    def get(self, codes: list[str]) -> Judgement | None:
        for axes, table in self._tables.items():
            verdict = table.get(tuple([codes[axis] for axis in axes]))
            if verdict is not None:
                return verdict
        return None

    def put(self, codes: list[str], read: set[str], verdict: Judgement) -> None:
        axes = tuple(axis for axis, name in enumerate(self._names) if name in read)
        self._tables.setdefault(axes, {})[tuple([codes[axis] for axis in axes])] = verdict


class ReadRecorder(dict[str, Any]):
    """A mapping that records which of its values are read. Reading its keys is free."""

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

    __hash__ = None


def _reading_all(name: str) -> Callable[..., Any]:
    def method(self: ReadRecorder, *args: Any) -> Any:
        self.read.update(self.keys())
        return getattr(dict, name)(self, *args)

    return method


for _name in (
    "items",
    "values",
    "copy",
    "setdefault",
    "pop",
    "popitem",
    "__eq__",
    "__ne__",
    "__repr__",
    "__or__",
):
    setattr(ReadRecorder, _name, _reading_all(_name))
