"""Whether the parts of a search agree: its space, its trials, their length and its metric.

Missing fields and wrong types are reported elsewhere; here they are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from determined_ds.config.fit_options import UNITS, FitOptions, Length
from determined_ds.config.hyperparameters import OVERWRITES, SHORTHANDS
from determined_ds.documents.document import KeyPath, dotted, words
from determined_ds.errors import NOT_GIVEN, Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space.rungs import brackets, rungs

HALVING = ("adaptive_asha", "async_halving")
LARGE_GRID = 1_000
LARGER_IS_BETTER = words("""acc accuracy auc auroc bleu dice f1 iou map mrr ndcg precision psnr r2 recall reward rouge
    score top1 top5""")
SMALLER_IS_BETTER = words("error loss mae mse nll perplexity ppl rmse wer")
POSITION = UNITS  # what the trials of this library report at each validation beside their metrics


def search_problems(
    experiment: Experiment, fit: FitOptions, *, reported: Collection[str] | None = None
) -> tuple[list[Problem], list[Problem]]:
    """What in a search cannot work, and what is probably a mistake.

    Args:
        experiment: With its space.
        fit: Of any of its points.
        reported: Names of the metrics that the trial reports at validation; None where they are not known.

    Returns:
        The problems, and the warnings.
    """
    search = _Search(experiment, fit)
    for check in (_space, _order, _direction, _concurrency):
        check(search)
    if search.name in HALVING:
        _time_metric(search, reported)
        _length(search)
        _rungs(search)
    return search.errors, search.warnings


class _Search:
    """The searcher's section, and what is wrong with it."""

    def __init__(self, experiment: Experiment, fit: FitOptions) -> None:
        self.experiment, self.fit = experiment, fit
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []
        self.space = experiment.space
        self.name = experiment.space.searcher
        section = experiment.document.get(("searcher",))
        self.section: dict[str, Any] = section if isinstance(section, dict) else {}

    def count(self, key: str) -> int | None:
        """A number above 0, or None."""
        value = self.section.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def unit(self) -> Any:
        return self.section.get("time_metric")

    @property
    def ladder(self) -> tuple[int, ...]:
        """The rungs; none where a field that they follow from is missing or wrong."""
        try:
            return rungs(self.section)
        except (KeyError, TypeError, ValueError, ArithmeticError, IndexError):
            return ()

    def add(self, path: KeyPath, message: str, fix: str, code: str, *, warning: bool = True) -> None:
        problem = self.experiment.document.problem(path, message, fix, code)
        if problem.value is None or isinstance(problem.value, dict):
            problem = replace(problem, value=NOT_GIVEN)
        (self.warnings if warning else self.errors).append(problem)


def _space(search: _Search) -> None:
    """What is searched, and how much of it there is.

    Source: ``newSingleSearch`` in determined 0.38.1's ``master/pkg/searcher/random.go``: single draws once; and
    ``newHyperparameterGrid`` in ``grid.go`` there: all points are laid out at once, however many, and none
    where there are no hyperparameters.
    """
    name, axes, size = ("searcher", "name"), search.space.axes, search.space.size
    max_trials = search.count("max_trials")
    if search.name == "single":
        if axes:
            message = f"draws one random value of {', '.join(axis.name for axis in axes)}, so that nothing is searched"
            search.add(name, message, "write values, or use random, grid or adaptive_asha", "search-single")
    elif search.name == "grid" and not search.space.constants:
        fix = "write the hyperparameters, or use single"
        message = "a grid without hyperparameters has no points, so no trial would start"
        search.add(name, message, fix, "search-nothing", warning=False)
    elif not axes:
        fix = "write a hyperparameter as {type: ..., ...}, or use single"
        search.add(
            name, "searches nothing: no hyperparameter is a range or a list of values", fix, "search-nothing"
        )
    elif search.name == "grid" and size is not None and size > LARGE_GRID:
        message = f"a grid of {size} points runs {size} trials; there is no limit"
        fix = "take fewer values of some, or use random with max_trials"
        search.add(name, message, fix, "search-grid-size")
    elif search.name != "grid" and size is not None and max_trials is not None and max_trials > size:
        message = f"is more than the {size} points of the space, so some are drawn repeatedly"
        fix = f"set searcher.max_trials to {size} or less, or use grid"
        search.add(("searcher", "max_trials"), message, fix, "search-repeats")


def _order(search: _Search) -> None:
    """A master draws other points each time where several hyperparameters of one mapping are searched."""
    for name, axes in search.space.unordered.items() if search.name != "single" else ():
        short = [axis.path[1:] for axis in axes]
        at_top = [key for key, path in SHORTHANDS.items() if name == OVERWRITES and path in short]
        message = (
            f"{len(axes)} hyperparameters are searched in one mapping ({', '.join(map(dotted, short))}): a master"
            " draws them in random order, so that two searches have different points"
        )
        fix = "search at most one hyperparameter in a mapping"
        if at_top:
            fix += f": write {' and '.join(f'hyperparameters.{key}' for key in at_top)} instead"
        search.add(("hyperparameters", name), message, fix, "search-order")


def _direction(search: _Search) -> None:
    metric, stated = search.section.get("metric"), search.section.get("smaller_is_better")
    if not isinstance(metric, str):
        return
    parts = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if parts & LARGER_IS_BETTER and not parts & SMALLER_IS_BETTER and stated is None:
        message = "is minimized, and looks like a metric that should be large"
        search.add(("searcher", "metric"), message, "add smaller_is_better: false", "search-direction")
    elif parts & SMALLER_IS_BETTER and not parts & LARGER_IS_BETTER and stated is False:
        path = ("searcher", "smaller_is_better")
        message = f"maximizes {metric}, which looks like a metric that should be small"
        search.add(path, message, "write true", "search-direction")


def _time_metric(search: _Search, reported: Collection[str] | None) -> None:
    """The master reads a trial's progress from the metrics of each validation, and fails where it is missing.

    Source: ``getMetric`` in determined 0.38.1's ``master/pkg/searcher/asha_stopping.go``.
    """
    unit = search.unit
    if not isinstance(unit, str) or unit in POSITION or unit in (reported or ()):
        return
    message = f"is not reported at validation: there, {' and '.join(POSITION)} are"
    if reported is None:
        message += ", and what the trial reports itself"
    length = search.fit.max_length
    fix = f"write {length.unit if length else POSITION[0]}"
    search.add(("searcher", "time_metric"), message, fix, "search-time", warning=reported is None)


def _length(search: _Search) -> None:
    """A trial of its full length has to reach the top rung, and no more.

    One that ends before it is not replaced by a next (``validationCompleted`` in determined 0.38.1's
    ``master/pkg/searcher/asha_stopping.go`` creates a trial where one is stopped).
    """
    length, max_time = search.fit.max_length, search.count("max_time")
    if length is None or not isinstance(length.value, int) or max_time is None or search.unit not in UNITS:
        return
    path, trained = ("searcher", "max_time"), f"fit.max_length is {length.value} {length.unit}"
    if length.unit != search.unit:
        message = (
            f"is in {search.unit}, and {trained}: the two cannot be compared, so no last rung is certain"
        )
        fix = f"set searcher.time_metric to {length.unit} and searcher.max_time to {length.value}"
        search.add(path, message, fix, "search-length")
    elif max_time > length.value:
        message = f"{trained}: no trial reaches the last rung, and a trial that ends earlier is not replaced"
        search.add(path, message, f"set searcher.max_time to {length.value}", "search-length")
    elif max_time < length.value:
        message = f"{trained}: each trial is stopped early"
        fix = f"set searcher.max_time to {length.value}, or fit.max_length to {{{length.unit}: {max_time}}}"
        search.add(path, message, fix, "search-length")


def _rungs(search: _Search) -> None:
    ladder = search.ladder
    if len(ladder) == 1:
        message = "no trial is stopped early: there is only one rung, the last"
        fix = "raise max_trials or max_time to the divisor (4 if absent) or more, or use random"
        search.add(("searcher", "name"), message, fix, "search-rungs")
    first = _first_validation(search.fit.validation_period, search.fit.max_length, search.unit)
    if len(ladder) < 2 or first is None or first <= ladder[0]:
        return
    late, unit = [rung for rung in ladder if rung < first], search.unit
    message = (
        f"trials are judged after {_listed(ladder)} {unit}, and validate after {first} first:"
        f" {_listed(late)} have no effect"
    )
    fewer = "max_rungs" if search.name == "adaptive_asha" else "num_rungs"
    fix = f"set fit.validation_period to {{{unit}: {ladder[0]}}}, or searcher.{fewer} to {len(ladder) - len(late)}"
    path = ("hyperparameters", "fit", "validation_period")
    search.add(path, message, fix, "search-validation")


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _first_validation(period: Length | None, length: Length | None, unit: Any) -> int | None:
    """When a trial first validates, in a unit; None where it is stated in another."""
    period = period or length  # without a period, at the end only
    if period is None or period.unit != unit:
        return None
    return period.value if isinstance(period.value, int) else min(period.value, default=None)


def _concurrency(search: _Search) -> None:
    """Source: ``getBracketMaxConcurrentTrials`` in determined 0.38.1's ``master/pkg/searcher/adaptive_asha.go``."""
    stated, max_trials = search.count("max_concurrent_trials"), search.count("max_trials")
    if stated is None or search.name == "single":
        return
    path = ("searcher", "max_concurrent_trials")
    trials = search.space.size if search.name == "grid" else max_trials
    if trials is not None and stated > trials:
        message = f"is more than the {trials} trials of the search"
        search.add(path, message, f"write {trials} or less", "search-concurrency")
    if search.name == "adaptive_asha" and search.ladder:
        count = len(brackets(search.section))
        if stated < count:
            message = f"is raised to {count}: the search runs {count} brackets at once, each with a trial"
            fix = f"write {count} or more, or mode: aggressive, which runs one"
            search.add(path, message, fix, "search-concurrency")
