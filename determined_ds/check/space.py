"""Points -> judge_points() -> Judgements, one for all points with the same findings -> point_findings()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.check.output import ERROR, WARNING, Finding, Share
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.documents.document import Document, words
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import resolve_stated
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space import Axis, Points

MOST_NAMED = 6  # values of an axis


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is found at some points."""

    problems: tuple[Problem, ...]  # why they do not run
    warnings: tuple[Problem, ...]
    points: list[int]  # their numbers
    resolved: ResolvedConfig | None  # of the first; None where it does not run, or its code decides that


class _Recorder(dict[str, Any]):
    """A mapping that records which of its values are read. Reading its keys is free."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def __iter__(self) -> Iterator[str]:  # so that a copy reads each value by its key
        return super().__iter__()

    __hash__ = None


def _recorded(name: str) -> Callable[..., Any]:
    def method(self: _Recorder, *args: Any) -> Any:
        self.read.update(args[:1] if name in ("__getitem__", "get") else self.keys())
        return getattr(dict, name)(self, *args)

    return method


for _name in words(
    "__getitem__ get items values copy setdefault pop popitem __eq__ __ne__ __repr__ __or__ __ror__"
):
    setattr(_Recorder, _name, _recorded(_name))


def judge_points(
    experiment: Experiment,
    points: Points,
    where: Where,
    check: Callable[[Document, ResolvedConfig | None], tuple[Iterable[Problem], Iterable[Problem]]],
) -> list[Judgement]:
    """Judge the points of an experiment's space, at the cost of the distinct ones.

    A decision reads some hyperparameters of a point, and not the model's own. What it reads is recorded, and another
    point with the same values there gets the same judgement. So ``check``, which finds further problems and warnings of
    a point, must read a hyperparameter each time that it needs it.
    """
    names = [axis.path[0] for axis in experiment.space.axes]
    found: dict[tuple[str, ...], Judgement] = {}
    known: dict[tuple[int, ...], dict[tuple[str, ...], Judgement]] = {}  # axes that were read -> values there
    for index, values in enumerate(points.values):
        codes = [*map(repr, values)]  # 1, 1.0 and true are equal, and not the same
        hits = (table.get(tuple([codes[axis] for axis in axes])) for axes, table in known.items())
        judged = next(filter(None, hits), None)
        if judged is None:
            recorder = _Recorder(experiment.space.at(values))
            hyperparameters, resolved = experiment.hyperparameters.holding(recorder), None
            problems, warnings = list[Problem](), list[Problem]()
            try:
                resolved = resolve_stated(experiment, hyperparameters, where)
                warnings += resolved.warnings if resolved else ()
            except ConfigError as error:
                problems, warnings = [*error.problems], [*error.warnings]
            more, odd = check(hyperparameters, resolved)
            problems += more
            warnings += odd
            key = (str(len(problems)), *(f"{each.code} {each}" for each in (*problems, *warnings)))
            runs = None if problems else resolved
            new = Judgement(problems=(*problems,), warnings=(*warnings,), points=[], resolved=runs)
            judged = found.setdefault(key, new)
            axes = tuple(axis for axis, name in enumerate(names) if name in recorder.read)
            known.setdefault(axes, {})[tuple([codes[axis] for axis in axes])] = judged
        judged.points.append(index)
    return list(found.values())


def point_findings(axes: Sequence[Axis], points: Points, judged: Sequence[Judgement]) -> list[Finding]:
    """Why points cannot run, and what is probably a mistake, each with the part of the space that has it.

    Where some points run, it is a warning: a search skips the others.
    """
    some_run = any(not each.problems for each in judged)
    having: dict[tuple[bool, str, str], tuple[Finding, set[int]]] = {}
    for each in judged:
        severity = WARNING if some_run else ERROR
        of_each = [(False, severity, problem) for problem in each.problems]
        if not (some_run and each.problems):
            of_each += [(True, WARNING, problem) for problem in each.warnings]
        for warns, severity, problem in of_each:
            finding = Finding(severity=severity, problem=problem)
            having.setdefault((warns, problem.code, problem.key), (finding, set()))[1].update(each.points)
    findings, total = [], len(points.values)
    for finding, members in having.values():
        share = None
        if len(members) < total:
            part = sum(index < points.num_drawn for index in members) / points.num_drawn
            where = _located(axes, points.values, members)
            share = Share(count=len(members), share=part, of=total, exact=points.exact, where=where)
        findings.append(replace(finding, share=share))
    return findings


def _located(axes: Sequence[Axis], values: Sequence[tuple[Any, ...]], members: set[int]) -> str:
    """Where in the space some points lie: ``all 4 points with zero_stage = 2 or 3 and micro_batch_size = 8``.

    That is the smallest part of the space around them. Where it has other points, too, each axis says at which values
    every point is one of them.
    """
    rows = [tuple(map(repr, point)) for point in values]
    outside = {*range(len(rows))} - members
    box: list[tuple[set[int], str]] = []  # of an axis: the points that it excludes, and its values in words
    whole: list[str] = []
    for axis, each in enumerate(axes):
        shown = dict(zip((row[axis] for row in rows), (point[axis] for point in values), strict=True))
        around = failing = {rows[index][axis] for index in members}
        is_range = each.kind in ("double", "log") and len(failing) > MOST_NAMED
        if is_range:
            low, high = (pick(shown[code] for code in failing) for pick in (min, max))
            around = {code for code, value in shown.items() if low <= value <= high}
        taken = [value for code, value in shown.items() if code in around]
        ends = f"from {_shown(min(taken))} to {_shown(max(taken))}" if is_range else _in_words(taken)
        box.append(({index for index in outside if rows[index][axis] not in around}, f"{each.name} {ends}"))
        if clear := failing - {rows[index][axis] for index in outside}:
            whole.append(
                f"every one with {each.name} {_in_words([shown[code] for code in shown if code in clear])}"
            )
    named = set()
    for excluded, text in sorted(box, key=lambda each: -len(each[0])):
        if excluded & outside:
            named.add(text)
            outside -= excluded
    if not outside:
        which = "the one point" if len(members) == 1 else f"all {len(members):,} points"
        return f"{which} with {' and '.join(text for _, text in box if text in named)}"
    first = zip(axes, values[min(members)], strict=True)
    whole.append(f"e.g. {', '.join(f'{axis.name} = {_shown(value)}' for axis, value in first)}")
    return f"{len(members):,} points: {'; '.join(whole)}"


def _in_words(taken: list[Any]) -> str:
    """Some values of an axis: ``= 1, 2 or 3``."""
    named = [_shown(value) for value in taken[:MOST_NAMED]]
    named += [f"{len(taken) - MOST_NAMED} more values"] if len(taken) > MOST_NAMED else []
    return f"= {' or '.join(filter(None, (', '.join(named[:-1]), named[-1])))}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)
