"""The search of an experiment: whether it fits itself, and every point of its space, with the share of a problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from determined_ds.check.output import ERROR, WARNING, Finding, Share
from determined_ds.check.trial import reports, stages_problem
from determined_ds.config.params import UNITS, FitOptions
from determined_ds.config.resolve import ResolvedConfig, Where
from determined_ds.documents.document import words
from determined_ds.errors import ConfigError, Problem, shown
from determined_ds.experiment.decide import resolve_stated
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.source import TrialClass
from determined_ds.experiment.space import HALVING, Axis

MOST_NAMED = 6  # values of an axis
LARGER_IS_BETTER = words("""acc accuracy auc auroc bleu dice f1 iou map mrr ndcg precision psnr r2 recall reward rouge
    score top1 top5""")
SMALLER_IS_BETTER = words("error loss mae mse nll perplexity ppl rmse wer")


def search_problems(
    experiment: Experiment, fit: FitOptions, trial: TrialClass | None
) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings): what in a search cannot work, and what is probably a mistake.

    Source: ``getMetric`` and ``validationCompleted`` in determined 0.38.1's ``master/pkg/searcher/asha_stopping.go``.
    """
    errors, warnings = list[Problem](), list[Problem]()
    document, axes, searcher = experiment.document, experiment.space.axes, experiment.space.searcher

    def add(to: list[Problem], key: str, message: str, fix: str, code: str) -> None:
        to.append(document.problem(("searcher", key), message, fix, code))

    if searcher == "single" and axes:
        names = ", ".join(axis.name for axis in axes)
        message = f"draws one random value of {names}, so that nothing is searched"
        add(warnings, "name", message, "write values, or use random, grid or adaptive_asha", "search-single")
    elif searcher != "single" and not axes:
        message = "searches nothing: no hyperparameter is a range or a list of values"
        no_trial = searcher == "grid" and not experiment.space.constants.data
        fix = "write a hyperparameter as {type: ..., ...}, or use single"
        add(errors if no_trial else warnings, "name", message, fix, "search-nothing")

    parts = set(re.split(r"[^a-z0-9]+", experiment.metric.lower()))
    small = bool(parts & SMALLER_IS_BETTER)
    if small != bool(parts & LARGER_IS_BETTER) and small != experiment.smaller_is_better:
        does, looks = ("maximized", "small") if small else ("minimized", "large")
        message = f"is {does}, and looks like a metric that should be {looks}"
        add(warnings, "metric", message, f"write smaller_is_better: {str(small).lower()}", "search-direction")
    if searcher not in HALVING:
        return errors, warnings

    # A master reads a trial's progress from each validation; a trial has to reach the top rung, and no more.
    unit, max_time = (document.get(("searcher", key)) for key in ("time_metric", "max_time"))
    length, is_reported = fit.max_length, reports(trial, unit) if trial else None
    if unit not in UNITS and not is_reported:
        message = f"is not reported at validation: there, {' and '.join(UNITS)} are"
        fix = f"write {length.unit if length else UNITS[0]}"
        add(warnings if is_reported is None else errors, "time_metric", message, fix, "search-time")
    if length and unit in UNITS and (unit, max_time) != (length.unit, length.value):
        message = (
            f"fit.max_length is {length.value} {length.unit}: trials end before the last rung, or stop early"
        )
        fix = f"set searcher.time_metric to {length.unit} and searcher.max_time to {length.value}, or train as long"
        add(warnings, "max_time", message, fix, "search-length")
    if fit.on_spike:
        message = (
            "compares trials at equal steps, and one that takes a spike back has other data behind it by then"
        )
        fix = (
            "leave out fit.on_spike in the search, or read its ranking as one of settings and spikes together"
        )
        add(warnings, "name", message, fix, "search-spike")
    return errors, warnings


# --------------------------------------------------------------------------------------- points


def judge_points(
    experiment: Experiment,
    points: Sequence[tuple[Any, ...]],
    where: Where,
    staged: TrialClass | None,
) -> tuple[list[Finding], int, ResolvedConfig | None]:
    """Judge each of some points of an experiment's space, whose pipelines are trained by ``staged``.

    Returns:
        Why points cannot run, which is a warning where others can, since a search skips them; and what is probably a
        mistake. How many can run. What the first of these is resolved to; None where code decides that.
    """
    axes, total = experiment.space.axes, len(points)
    first: ResolvedConfig | None = None
    refused: list[int] = []  # points that cannot run
    found: dict[tuple[bool, str, str], tuple[Problem, set[int]]] = {}  # whether it stops, code and key
    for index, values in enumerate(points):
        point, resolved = experiment.hyperparameters.holding(experiment.space.at(values)), None
        try:
            resolved = resolve_stated(experiment, point, where)
            problems, warnings = list[Problem](), [*resolved.warnings] if resolved else []
        except ConfigError as error:
            problems, warnings = [*error.problems], [*error.warnings]
        if staged and (wrong := stages_problem(point, staged)):
            problems.append(wrong)
        if problems:
            refused.append(index)
        elif first is None:
            first = resolved
        for stops, problem in [
            *((True, each) for each in problems),
            *((False, each) for each in warnings),
        ]:
            found.setdefault((stops, problem.code, problem.key), (problem, set()))[1].add(index)

    num_runnable = total - len(refused)
    if num_runnable:  # a search skips the others, whatever else is odd about them
        for (stops, _, _), (_, members) in found.items():
            members -= set() if stops else {*refused}
    findings = []
    for (stops, _, _), (problem, members) in found.items():
        if not members:
            continue
        share = None
        if len(members) < total:
            share = Share(count=len(members), of=total, where=_located(axes, points, members))
        severity = ERROR if stops and not num_runnable else WARNING
        findings.append(Finding(severity=severity, problem=problem, share=share))
    return findings, num_runnable, first


def _located(axes: Sequence[Axis], values: Sequence[tuple[Any, ...]], members: set[int]) -> str:
    """Where in the space some points lie: ``with zero_stage = 2 or 3, e.g. zero_stage = 2, ...``.

    An axis on which they have all the values, or more than a few, says nothing.
    """
    around = []
    for axis, each in enumerate(axes):
        taken = [*dict.fromkeys(_shown(values[index][axis]) for index in sorted(members))]
        if each.num_values is not None and len(taken) < each.num_values and len(taken) <= MOST_NAMED:
            around.append(f"{each.name} = {' or '.join(taken)}")
    first = zip(axes, values[min(members)], strict=True)
    example = ", ".join(f"{axis.name} = {_shown(value)}" for axis, value in first)
    return f"with {' and '.join(around)}, e.g. {example}" if around else f"e.g. {example}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else shown(value)
