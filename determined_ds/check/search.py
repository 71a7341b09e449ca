"""Whether a search fits itself: its space, the direction of its metric, and when it judges its trials."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from determined_ds.config.params import UNITS, FitOptions
from determined_ds.documents.document import words
from determined_ds.errors import NOT_GIVEN, Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space import HALVING

LARGER_IS_BETTER = words("""acc accuracy auc auroc bleu dice f1 iou map mrr ndcg precision psnr r2 recall reward rouge
    score top1 top5""")
SMALLER_IS_BETTER = words("error loss mae mse nll perplexity ppl rmse wer")


def search_problems(
    experiment: Experiment, fit: FitOptions, *, reports: Callable[[str], bool | None] = lambda metric: None
) -> tuple[list[Problem], list[Problem]]:
    """What in a search cannot work, and what is probably a mistake. Missing fields and wrong types are skipped.

    ``reports`` says whether the trial reports a metric at validation; None where that is not known.

    Source: ``getMetric`` and ``validationCompleted`` in determined 0.38.1's ``master/pkg/searcher/asha_stopping.go``.
    """
    errors: list[Problem] = []
    warnings: list[Problem] = []
    searcher, axes = experiment.space.searcher, experiment.space.axes
    stated = experiment.document.get(("searcher",))
    section: dict[str, Any] = stated if isinstance(stated, dict) else {}

    def add(key: str, message: str, fix: str, code: str, to: list[Problem] = warnings) -> None:
        path = tuple(key.split(".")) if "." in key else ("searcher", key)
        problem = experiment.document.problem(path, message, fix, code)
        shown = NOT_GIVEN if problem.value is None or isinstance(problem.value, dict) else problem.value
        to.append(replace(problem, value=shown))

    if searcher == "single" and axes:
        message = (
            f"draws one random value of {', '.join(axis.name for axis in axes)}, so that nothing is searched"
        )
        add("name", message, "write values, or use random, grid or adaptive_asha", "search-single")
    elif searcher != "single" and not axes:
        message = "searches nothing: no hyperparameter is a range or a list of values"
        no_points = searcher == "grid" and not experiment.space.constants.data  # so no trial would start
        fix = "write a hyperparameter as {type: ..., ...}, or use single"
        add("name", message, fix, "search-nothing", errors if no_points else warnings)

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
    unit, length, stated = section.get("time_metric"), fit.max_length, section.get("max_time")
    if isinstance(unit, str) and unit not in UNITS and not (is_reported := reports(unit)):
        own = ", and what the trial reports itself" if is_reported is None else ""
        message = f"is not reported at validation: there, {' and '.join(UNITS)} are{own}"
        fix = f"write {length.unit if length else UNITS[0]}"
        add("time_metric", message, fix, "search-time", warnings if is_reported is None else errors)
    if length and isinstance(length.value, int) and type(stated) is int and stated > 0 and unit in UNITS:
        message = f"fit.max_length is {length.value} {length.unit}: "
        fix = f"set searcher.max_time to {length.value}"
        if length.unit != unit:
            fix = f"set searcher.time_metric to {length.unit} and searcher.max_time to {length.value}"
            add("max_time", f"{message}a length in {unit} cannot be compared", fix, "search-length")
        elif stated > length.value:
            message += "no trial reaches the last rung, and one that ends earlier is not replaced"
            add("max_time", message, fix, "search-length")
        elif stated < length.value:
            fix += f", or fit.max_length to {{{length.unit}: {stated}}}"
            add("max_time", f"{message}each trial is stopped early", fix, "search-length")
    return errors, warnings
