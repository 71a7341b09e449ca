"""Every point of a search space judged, where in the space those lie that cannot run, and whether a search agrees.

The way of a value::

    Points -> judge_points() -> Judgement, one for all points with the same findings -> point_findings()
    searcher: in the YAML    -> search_problems()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_ds.check.output import ERROR, WARNING, Finding, Share
from determined_ds.config.params import OVERWRITES, SHORTHANDS, UNITS, FitOptions
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.documents.document import Document, dotted, words
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem
from determined_ds.experiment.decide import on_slots_of, resolve_stated
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space import HALVING, Axis, Points, rungs

# --- Points -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is found at some points.

    Args:
        problems: Why they do not run; none where they do.
        warnings: What is possible, but probably a mistake.
        points: Their numbers in the space's points.
        resolved: What the first of them runs with; None where it does not run, or where its code decides that.
    """

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    points: list[int]
    resolved: ResolvedConfig | None


class _Recorder(dict[str, Any]):
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
    def method(self: _Recorder, *args: Any) -> Any:
        self.read.update(self.keys())
        return getattr(dict, name)(self, *args)

    return method


for _name in words("items values copy setdefault pop popitem __eq__ __ne__ __repr__ __or__ __ror__"):
    setattr(_Recorder, _name, _reading_all(_name))


def judge_points(
    experiment: Experiment,
    points: Points,
    where: Where,
    check: Callable[[Document, ResolvedConfig | None], tuple[Iterable[Problem], Iterable[Problem]]],
) -> list[Judgement]:
    """Judge the points of an experiment's space, at the cost of the distinct ones.

    A decision reads some hyperparameters of a point, and not the model's own. What it reads is recorded, and another
    point with the same values there gets the same judgement.

    Args:
        experiment: Whose space they are of.
        points: Of its space.
        where: Where they would train.
        check: Further problems and warnings of a point. It must read a hyperparameter each time that it needs it.

    Returns:
        A judgement for all points with the same findings, in the order of their first points.
    """
    where = on_slots_of(experiment, where)
    names = [axis.path[0] for axis in experiment.space.axes]
    found: dict[tuple[str, ...], Judgement] = {}
    known: dict[tuple[int, ...], dict[tuple[str, ...], Judgement]] = {}  # axes that were read -> values there
    for index, values in enumerate(points.values):
        codes = [*map(repr, values)]  # 1, 1.0 and true are equal, and not the same
        hits = (table.get(tuple([codes[axis] for axis in axes])) for axes, table in known.items())
        judged = next(filter(None, hits), None)
        if judged is None:
            recorder = _Recorder(experiment.space.at(values))
            hyperparameters = experiment.at(recorder)
            resolved: ResolvedConfig | None = None
            problems: tuple[Problem, ...] = ()
            warnings: tuple[Problem, ...] = ()
            try:
                resolved = resolve_stated(experiment, hyperparameters, where)
                warnings = resolved.warnings if resolved else ()
            except ConfigError as error:
                problems, warnings = (*error.problems,), (*error.warnings,)
            further = check(hyperparameters, resolved)
            problems, warnings = (*problems, *further[0]), (*warnings, *further[1])
            runs = None if problems else resolved
            judged = Judgement(problems=problems, warnings=warnings, points=[], resolved=runs)
            texts = [f"{problem.code} {problem}" for problem in (*problems, *warnings)]
            judged = found.setdefault((str(len(problems)), *texts), judged)
            axes = tuple(axis for axis, name in enumerate(names) if name in recorder.read)
            known.setdefault(axes, {})[tuple([codes[axis] for axis in axes])] = judged
        judged.points.append(index)
    return list(found.values())


def point_findings(axes: Sequence[Axis], points: Points, judged: Sequence[Judgement]) -> list[Finding]:
    """Why points cannot run, and what is probably a mistake, each with the part of the space that has it.

    Where some points run, it is a warning: a search skips the others.
    """
    some_run = any(not each.problems for each in judged)
    fails = WARNING if some_run else ERROR
    having: dict[tuple[bool, str, str], tuple[Finding, set[int]]] = {}
    for each in judged:
        warnings = () if some_run and each.problems else each.warnings
        of_each = [(False, fails, problem) for problem in each.problems]
        for warns, severity, problem in (*of_each, *((True, WARNING, problem) for problem in warnings)):
            finding = Finding(severity=severity, problem=problem)
            having.setdefault((warns, problem.code, problem.key), (finding, set()))[1].update(each.points)
    findings, total = [], len(points.values)
    for _, (finding, members) in sorted(having.items(), key=lambda item: (item[0][0], -len(item[1][1]))):
        if len(members) < total:
            share = Share(
                num_points=len(members),
                share=sum(index < points.num_drawn for index in members) / points.num_drawn,
                of=total,
                exact=points.exact,
                where=_located(axes, points.values, members),
            )
            finding = replace(finding, share=share)
        findings.append(finding)
    return findings


# --- Where they lie ---------------------------------------------------------------------------------------

MOST_NAMED = 6  # values of an axis


def _located(axes: Sequence[Axis], values: Sequence[tuple[Any, ...]], members: set[int]) -> str:
    """Where in the space some points lie: ``all 4 points with zero_stage = 2 or 3 and micro_batch_size = 8``.

    That is the smallest part of the space around them. Where it has other points, too, each axis says at which values
    every point is one of them, and at which none is; and there is an example.
    """
    rows = [tuple(map(repr, point)) for point in values]
    box: dict[int, tuple[set[str], str]] = {}  # axis -> its values in that part, and in words
    whole: list[str] = []
    none: list[str] = []
    for axis, each in enumerate(axes):
        shown = dict(zip((row[axis] for row in rows), (point[axis] for point in values), strict=True))
        failing = {rows[index][axis] for index in members}
        running = {row[axis] for index, row in enumerate(rows) if index not in members}
        around = failing
        if each.kind in ("double", "log") and len(failing) > MOST_NAMED:
            low, high = (pick(shown[code] for code in failing) for pick in (min, max))
            around = {code for code, value in shown.items() if low <= value <= high}
        if len(around) < len(shown):
            box[axis] = around, f"{each.name} {_values_in_words(shown, around)}"
        for clear, said in ((failing - running, whole), (running - failing, none)):
            if clear:
                said.append(f"{each.name} {_values_in_words(shown, clear)}")

    def num_in(part: Iterable[int]) -> int:
        return sum(all(row[axis] in box[axis][0] for axis in part) for row in rows)

    count = num_in(box)
    part = [*box]
    for axis in box:  # only the axes that exclude any other point
        fewer = [other for other in part if other != axis]
        part = fewer if num_in(fewer) == count else part
    num = f"{len(members):,}"
    if count == len(members):
        which = "the one point" if count == 1 else f"all {num} points"
        return f"{which} with {' and '.join(box[axis][1] for axis in part)}"
    example = ", ".join(
        f"{axis.name} = {_shown(value)}" for axis, value in zip(axes, values[min(members)], strict=True)
    )
    said = [f"every one with {each}" for each in whole] + [f"none with {each}" for each in none]
    return f"{num} points: {'; '.join([*said, f'e.g. {example}'])}"


def _values_in_words(shown: Mapping[str, Any], chosen: Collection[str]) -> str:
    """Some values of an axis, of all that were looked at."""
    taken = [value for code, value in shown.items() if code in chosen]
    others = [value for code, value in shown.items() if code not in chosen]
    if all(type(value) in (int, float) for value in (*taken, *others)):
        taken.sort()
        if len(taken) > MOST_NAMED and not any(taken[0] <= other <= taken[-1] for other in others):
            return f"from {_shown(taken[0])} to {_shown(taken[-1])}"
    if len(taken) > MOST_NAMED >= len(others):
        return f"other than {listed(others, 'or')}"
    if len(taken) > MOST_NAMED:
        taken = [*taken[:MOST_NAMED], f"{len(taken) - MOST_NAMED} more values"]
    return f"= {listed(taken, 'or')}"


def listed(values: Sequence[Any], word: str = "and") -> str:
    """``1, 2 and 3``."""
    *most, last = map(_shown, values)
    return f"{', '.join(most)} {word} {last}" if most else last


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)


# --- The search itself ------------------------------------------------------------------------------------

LARGE_GRID = 1_000
LARGER_IS_BETTER = words("""acc accuracy auc auroc bleu dice f1 iou map mrr ndcg precision psnr r2 recall reward rouge
    score top1 top5""")
SMALLER_IS_BETTER = words("error loss mae mse nll perplexity ppl rmse wer")


def search_problems(
    experiment: Experiment, fit: FitOptions, *, reported: Collection[str] | None = None
) -> tuple[list[Problem], list[Problem]]:
    """What in a search cannot work, and what is probably a mistake. Missing fields and wrong types are skipped.

    Args:
        experiment: With its space.
        fit: Of any of its points.
        reported: Names of the metrics that the trial reports at validation; None where they are not known.

    Returns:
        The problems, and the warnings.

    Source: ``getMetric`` and ``validationCompleted`` in determined 0.38.1's ``master/pkg/searcher/asha_stopping.go``,
    ``random.go``, ``grid.go``.
    """
    errors: list[Problem] = []
    warnings: list[Problem] = []
    space = experiment.space
    searcher, axes, size = space.searcher, space.axes, space.size
    stated = experiment.document.get(("searcher",))
    section: dict[str, Any] = stated if isinstance(stated, dict) else {}

    def add(key: str, message: str, fix: str, code: str, to: list[Problem] = warnings) -> None:
        path = tuple(key.split(".")) if "." in key else ("searcher", key)
        problem = experiment.document.problem(path, message, fix, code)
        shown = NOT_GIVEN if problem.value is None or isinstance(problem.value, dict) else problem.value
        to.append(replace(problem, value=shown))

    def count(key: str) -> int | None:
        value = section.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    # What is searched, and how much of it there is.
    max_trials = count("max_trials")
    if searcher == "single" and axes:
        message = (
            f"draws one random value of {', '.join(axis.name for axis in axes)}, so that nothing is searched"
        )
        add("name", message, "write values, or use random, grid or adaptive_asha", "search-single")
    elif searcher == "grid" and not space.constants:
        message = "a grid without hyperparameters has no points, so no trial would start"
        add("name", message, "write the hyperparameters, or use single", "search-nothing", errors)
    elif searcher != "single" and not axes:
        fix = "write a hyperparameter as {type: ..., ...}, or use single"
        add(
            "name",
            "searches nothing: no hyperparameter is a range or a list of values",
            fix,
            "search-nothing",
        )
    elif searcher == "grid" and size is not None and size > LARGE_GRID:
        fix = "take fewer values of some, or use random with max_trials"
        add("name", f"a grid of {size} points runs {size} trials; there is no limit", fix, "search-grid-size")
    elif searcher != "grid" and size is not None and max_trials is not None and max_trials > size:
        message = f"is more than the {size} points of the space, so some are drawn repeatedly"
        add(
            "max_trials", message, f"set searcher.max_trials to {size} or less, or use grid", "search-repeats"
        )
    # A master draws the axes of one mapping in the order of a Go map, which changes from draw to draw. A grid draws
    # nothing, and a list of one value takes no number.
    drawn: dict[str | int, list[Axis]] = {}
    for axis in axes if searcher not in ("single", "grid") else ():
        if axis.num_values != 1:
            drawn.setdefault(axis.path[0], []).append(axis)
    for key, below in ((key, below) for key, below in drawn.items() if len(below) > 1):
        short = [axis.path[1:] for axis in below]
        message = (
            f"{len(below)} hyperparameters are searched in one mapping ({', '.join(map(dotted, short))}): a master"
            " draws them in random order, so that two searches have different points"
        )
        at_top = [other for other, path in SHORTHANDS.items() if key == OVERWRITES and path in short]
        instead = f": write {' and '.join(f'hyperparameters.{other}' for other in at_top)} instead"
        fix = f"search at most one hyperparameter in a mapping{instead if at_top else ''}"
        add(f"hyperparameters.{key}", message, fix, "search-order")

    # The direction of the metric.
    metric, smaller = section.get("metric"), section.get("smaller_is_better")
    parts = set(re.split(r"[^a-z0-9]+", metric.lower())) if isinstance(metric, str) else set()
    if parts & LARGER_IS_BETTER and not parts & SMALLER_IS_BETTER and smaller is None:
        message = "is minimized, and looks like a metric that should be large"
        add("metric", message, "add smaller_is_better: false", "search-direction")
    elif parts & SMALLER_IS_BETTER and not parts & LARGER_IS_BETTER and smaller is False:
        message = f"maximizes {metric}, which looks like a metric that should be small"
        add("smaller_is_better", message, "write true", "search-direction")
    if searcher not in HALVING:
        return errors, warnings

    # A master reads a trial's progress from each validation; a trial has to reach the top rung, and no more.
    unit, length, max_time = section.get("time_metric"), fit.max_length, count("max_time")
    if isinstance(unit, str) and unit not in UNITS and unit not in (reported or ()):
        own = ", and what the trial reports itself" if reported is None else ""
        message = f"is not reported at validation: there, {' and '.join(UNITS)} are{own}"
        fix = f"write {length.unit if length else UNITS[0]}"
        add("time_metric", message, fix, "search-time", warnings if reported is None else errors)
    if length is not None and isinstance(length.value, int) and max_time is not None and unit in UNITS:
        trained = f"fit.max_length is {length.value} {length.unit}"
        message, fix = "", f"set searcher.max_time to {length.value}"
        if length.unit != unit:
            message = f"is in {unit}, and {trained}: the two cannot be compared, so no last rung is certain"
            fix = f"set searcher.time_metric to {length.unit} and searcher.max_time to {length.value}"
        elif max_time > length.value:
            message = (
                f"{trained}: no trial reaches the last rung, and a trial that ends earlier is not replaced"
            )
        elif max_time < length.value:
            message = f"{trained}: each trial is stopped early"
            fix += f", or fit.max_length to {{{length.unit}: {max_time}}}"
        if message:
            add("max_time", message, fix, "search-length")
    try:
        ladder = rungs(section)
    except (KeyError, TypeError, ValueError, ArithmeticError, IndexError):
        return errors, warnings
    if len(ladder) == 1:
        message = "no trial is stopped early: there is only one rung, the last"
        fix = "raise max_trials or max_time to the divisor (4 if absent) or more, or use random"
        add("name", message, fix, "search-rungs")
    period = fit.validation_period or length  # without a period, at the end only
    first = period.value if period is not None and period.unit == unit else None
    first = min(first, default=None) if isinstance(first, tuple) else first
    if len(ladder) > 1 and first is not None and first > ladder[0]:
        late = [rung for rung in ladder if rung < first]
        judged = f"trials are judged after {listed(ladder)} {unit}, and validate after {first} first"
        fewer = "max_rungs" if searcher == "adaptive_asha" else "num_rungs"
        fix = f"set fit.validation_period to {{{unit}: {ladder[0]}}}, or searcher.{fewer} to {len(ladder) - len(late)}"
        message = f"{judged}: {listed(late)} have no effect"
        add("hyperparameters.fit.validation_period", message, fix, "search-validation")
    return errors, warnings
