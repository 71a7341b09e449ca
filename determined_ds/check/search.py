"""Whether a search fits itself: its space, the direction of its metric, and when it judges its trials."""

from __future__ import annotations

import re

from determined_ds.check.trial import reports
from determined_ds.config.params import UNITS, FitOptions
from determined_ds.documents.document import words
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.source import TrialClass
from determined_ds.experiment.space import HALVING

LARGER_IS_BETTER = words("""acc accuracy auc auroc bleu dice f1 iou map mrr ndcg precision psnr r2 recall reward rouge
    score top1 top5""")
SMALLER_IS_BETTER = words("error loss mae mse nll perplexity ppl rmse wer")


def search_problems(
    experiment: Experiment, fit: FitOptions, trial: TrialClass | None
) -> tuple[list[Problem], list[Problem]]:
    """What in a search cannot work, and what is probably a mistake.

    Args:
        experiment: Its ``searcher`` is as its schema wants it.
        fit: How long it trains.
        trial: What reports the metrics; None where they are not known.

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
        own = ", and what the trial reports itself" if is_reported is None else ""
        message = f"is not reported at validation: there, {' and '.join(UNITS)} are{own}"
        fix = f"write {length.unit if length else UNITS[0]}"
        add(warnings if is_reported is None else errors, "time_metric", message, fix, "search-time")
    if length and unit in UNITS and (unit, max_time) != (length.unit, length.value):
        fix = f"set searcher.max_time to {length.value}"
        if unit != length.unit:
            message = f"a length in {unit} cannot be compared"
            fix = f"set searcher.time_metric to {length.unit} and searcher.max_time to {length.value}"
        elif max_time > length.value:
            message = "no trial reaches the last rung, and one that ends earlier is not replaced"
        else:
            message = "each trial is stopped early"
            fix += f", or fit.max_length to {{{length.unit}: {max_time}}}"
        message = f"fit.max_length is {length.value} {length.unit}: {message}"
        add(warnings, "max_time", message, fix, "search-length")
    return errors, warnings
