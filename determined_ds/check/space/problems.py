"""Whether a search fits itself: its space, its trials, their length and the metric it goes by.

That each field is there and of its type is not looked at here; a field that is not is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from determined_ds.config.hyperparameters import OVERWRITES, SHORTHANDS, UNITS, FitOptions, Length
from determined_ds.documents.document import KeyPath, dotted, words
from determined_ds.errors import Problem
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
    """What of a search cannot work, and what is probably not meant so.

    Args:
        experiment: With its space.
        fit: Of any of its points.
        reported: Names of the metrics that the trial reports at validation; None where they are not known.

    Returns:
        The problems, and the warnings.
    """
    search = _Search(experiment, fit)
    told = [*_space(search), *_order(search), *_direction(search)]
    if search.name in HALVING:
        told += [*_time_metric(search, reported), *_length(search), *_rungs(search)]
    told += _concurrency(search)
    return [item.problem for item in told if not item.warning], [
        item.problem for item in told if item.warning
    ]


@dataclass(frozen=True)
class _Told:
    problem: Problem
    warning: bool


class _Search:
    """The searcher's section, read with an eye to types."""

    def __init__(self, experiment: Experiment, fit: FitOptions) -> None:
        self.experiment, self.fit = experiment, fit
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

    def told(self, key: KeyPath, message: str, fix: str, code: str, *, warning: bool = True) -> _Told:
        document = self.experiment.document
        value = document.get(key)
        given = {} if value is None or isinstance(value, dict) else {"value": value}
        problem = Problem(
            key=document.key(key),
            **given,
            origin=document.origin(key),
            message=message,
            fix=fix,
            code=code,
        )
        return _Told(problem, warning)


def _space(search: _Search) -> Iterator[_Told]:
    """What is searched, and how much of it there is.

    Source: ``newSingleSearch`` in determined 0.38.1's ``master/pkg/searcher/random.go``: single draws once; and
    ``newHyperparameterGrid`` in ``grid.go`` there: all points are laid out at once, however many, and none
    where there are no hyperparameters.
    """
    name, axes, size = ("searcher", "name"), search.space.axes, search.space.size
    max_trials = search.count("max_trials")
    if search.name == "single":
        if axes:
            message = (
                f"draws one value of {', '.join(axis.name for axis in axes)} by chance, and searches nothing"
            )
            yield search.told(
                name, message, "write values, or use random, grid or adaptive_asha", "search-single"
            )
    elif search.name == "grid" and not search.space.constants:
        fix = "write the hyperparameters, or use single"
        message = "a grid without hyperparameters has no point, so that no trial would start"
        yield search.told(name, message, fix, "search-nothing", warning=False)
    elif not axes:
        fix = "write a hyperparameter as {type: ..., ...}, or use single"
        yield search.told(
            name, "searches nothing: no hyperparameter is a range or a list of values", fix, "search-nothing"
        )
    elif search.name == "grid" and size is not None and size > LARGE_GRID:
        message = f"a grid of {size} points runs {size} trials; there is no limit"
        fix = "take fewer values of some, or use random with max_trials"
        yield search.told(name, message, fix, "search-grid-size")
    elif search.name != "grid" and size is not None and max_trials is not None and max_trials > size:
        message = f"is more than the {size} points of the space; they are drawn with repetition"
        fix = f"set searcher.max_trials to {size} or less, or use grid"
        yield search.told(("searcher", "max_trials"), message, fix, "search-repeats")


def _order(search: _Search) -> Iterator[_Told]:
    """A master draws other points each time where it draws several hyperparameters out of one mapping."""
    for name, axes in search.space.unordered.items() if search.name != "single" else ():
        short = [axis.path[1:] for axis in axes]
        at_top = [key for key, path in SHORTHANDS.items() if name == OVERWRITES and path in short]
        message = (
            f"{len(axes)} hyperparameters are searched in one mapping ({', '.join(map(dotted, short))}): a master"
            " draws them in no certain order, so that two searches have different points"
        )
        fix = "search at most one hyperparameter in a mapping"
        if at_top:
            fix += (
                f": write {' and '.join(f'hyperparameters.{key}' for key in at_top)} for what it stands for"
            )
        yield search.told(("hyperparameters", name), message, fix, "search-order")


def _direction(search: _Search) -> Iterator[_Told]:
    metric, stated = search.section.get("metric"), search.section.get("smaller_is_better")
    if not isinstance(metric, str):
        return
    parts = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if parts & LARGER_IS_BETTER and not parts & SMALLER_IS_BETTER and stated is None:
        message = "is taken to be better the smaller it is, and looks like one that should be large"
        yield search.told(("searcher", "metric"), message, "add smaller_is_better: false", "search-direction")
    elif parts & SMALLER_IS_BETTER and not parts & LARGER_IS_BETTER and stated is False:
        path = ("searcher", "smaller_is_better")
        message = f"makes the largest {metric} the best, and it looks like one that should be small"
        yield search.told(path, message, "write true", "search-direction")


def _time_metric(search: _Search, reported: Collection[str] | None) -> Iterator[_Told]:
    """The master reads how far a trial is out of the metrics of each validation, and fails where it is not there.

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
    yield search.told(("searcher", "time_metric"), message, fix, "search-time", warning=reported is None)


def _length(search: _Search) -> Iterator[_Told]:
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
            f"is in {search.unit}, and {trained}: whether a trial reaches its last rung is left to chance"
        )
        fix = f"set searcher.time_metric to {length.unit} and searcher.max_time to {length.value}"
        yield search.told(path, message, fix, "search-length")
    elif max_time > length.value:
        message = (
            f"{trained}: no trial reaches its last rung, and none that ends before it is followed by another"
        )
        yield search.told(path, message, f"set searcher.max_time to {length.value}", "search-length")
    elif max_time < length.value:
        message = f"{trained}: each trial is stopped before its end"
        fix = f"set searcher.max_time to {length.value}, or fit.max_length to {{{length.unit}: {max_time}}}"
        yield search.told(path, message, fix, "search-length")


def _rungs(search: _Search) -> Iterator[_Told]:
    ladder = search.ladder
    if len(ladder) == 1:
        message = "no trial is stopped early: there is one rung only, the last"
        fix = "raise max_trials or max_time to the divisor (4 if absent) or more, or use random"
        yield search.told(("searcher", "name"), message, fix, "search-rungs")
    first = _first_validation(search.fit.validation_period, search.fit.max_length, search.unit)
    if len(ladder) < 2 or first is None or first <= ladder[0]:
        return
    late, unit = [rung for rung in ladder if rung < first], search.unit
    message = (
        f"trials are judged after {_listed(ladder)} {unit}, and validate after {first} first:"
        f" they pass {_listed(late)} without being judged"
    )
    fewer = "max_rungs" if search.name == "adaptive_asha" else "num_rungs"
    fix = f"set fit.validation_period to {{{unit}: {ladder[0]}}}, or searcher.{fewer} to {len(ladder) - len(late)}"
    path = ("hyperparameters", "fit", "validation_period")
    yield search.told(path, message, fix, "search-validation")


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def _first_validation(period: Length | None, length: Length | None, unit: Any) -> int | None:
    """When a trial first validates, in a unit; None where that cannot be told in it."""
    period = period or length  # without a period, at the end only
    if period is None or period.unit != unit:
        return None
    return period.value if isinstance(period.value, int) else min(period.value, default=None)


def _concurrency(search: _Search) -> Iterator[_Told]:
    """Source: ``getBracketMaxConcurrentTrials`` in determined 0.38.1's ``master/pkg/searcher/adaptive_asha.go``."""
    stated, max_trials = search.count("max_concurrent_trials"), search.count("max_trials")
    if stated is None or search.name == "single":
        return
    path = ("searcher", "max_concurrent_trials")
    trials = search.space.size if search.name == "grid" else max_trials
    if trials is not None and stated > trials:
        message = f"is more than the {trials} trials of the search"
        yield search.told(path, message, f"write {trials} or less", "search-concurrency")
    if search.name == "adaptive_asha" and search.ladder:
        count = len(brackets(search.section))
        if stated < count:
            message = (
                f"is raised to {count}: the search runs {count} brackets side by side, each with a trial"
            )
            fix = f"write {count} or more, or mode: aggressive, which runs one"
            yield search.told(path, message, fix, "search-concurrency")
