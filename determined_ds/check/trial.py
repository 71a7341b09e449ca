"""What an experiment runs, held against the experiment: its code is there, and can do what is asked of it.

The code is read, never imported. Where its source does not show an answer, nothing is said, or a note.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from determined_ds.config.params import by_real_names
from determined_ds.documents.document import Document, nearest
from determined_ds.errors import Problem
from determined_ds.experiment.entrypoint import Entrypoint
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.source import (
    Source,
    SourceError,
    TrialClass,
    find_code,
    installed,
    may_use_library,
    sources_of,
)

METRIC = ("searcher", "metric")
ADDS_METRICS = re.compile(r"\b(wrap_reducer|on_validation_end)\b")
PREFIX = "validation_"  # of every name that DataParallelTrial.evaluate makes


def code_problems(experiment: Experiment, context_dir: Path, *, option: str = "") -> list[Problem]:
    """Why what an experiment runs cannot run here; with the code ``OWN_DRIVER`` it may run on a cluster.

    A module that is not in the context directory may be installed; what is in it is left to the ranks.

    Args:
        experiment: What is run.
        context_dir: The folder with the code.
        option: One of a command that a script can honour with this library alone: ``--test`` or ``--measure``.
    """
    script, file = experiment.script, find_code(experiment.entrypoint, context_dir)
    module, _, wanted = experiment.trial.partition(":")
    if file is None:
        is_file = script is not None and not script.is_module
        wanted = script.name if script else module
        if not is_file and installed(wanted.split(".")[0], context_dir):
            return []
        message = f"the context directory has no {'file' if is_file else 'module'} {wanted}"
        fix = f"is {context_dir} the right CONTEXT_DIR?"
    else:
        try:
            if script:
                unused = option and not may_use_library(file, context_dir)
                found = [without_library(script, option)] if unused else []
                read = sources_of(file, context_dir).values()
                return [problem for source in read for problem in source.own_drivers()] or found
            source = Source(file, context_dir)
            words = rf"\b({wanted}|__getattr__|globals|locals|vars|exec|setattr)\b"
            if {wanted, "*"} & source.bound.keys() or re.search(words, source.text):
                return []
            message = f"module {module} has no {wanted}"
            classes = [node.name for node in source.tree.body if isinstance(node, ast.ClassDef)]
            fix = f"it has: {', '.join(classes) or 'no class'}"
        except SourceError as error:
            where = f"{file.relative_to(context_dir)}{f':{error.line}' if error.line else ''}"
            message, fix = f"{where} {error}", f"fix {where}"
    stated = str(experiment.entrypoint)
    return [experiment.document.problem(("entrypoint",), message, fix, "entrypoint", value=stated)]


def without_library(script: Entrypoint, option: str) -> Problem:
    """The problem of ``--test`` or ``--measure`` for a script of which nothing of this library sees a step."""
    message = f"{script.name} trains without determined_ds.session(), so no step is measured or left out"
    fix = "train by determined_ds.session() or determined_ds.deepspeed.Trainer in it, or leave the option out"
    return Problem(key=option, message=message, fix=fix, code=option.removeprefix("--"))


def stages_problem(hyperparameters: Document, trial: TrialClass) -> Problem | None:
    """The problem of pipeline stages in a trial that has none; None without a pipeline, or where that is unknown."""
    hyperparameters = by_real_names(hyperparameters)[0]
    stages = hyperparameters.get(("pipe_parallel_size",))
    if not isinstance(stages, int) or stages <= 1 or trial.has_stages is not False:
        return None
    message = f"{trial.name} is not a PipelineTrial, so it has no stages"
    fix = "set pipe_parallel_size to 1, or name a PipelineTrial in the entrypoint"
    return hyperparameters.problem(("pipe_parallel_size",), message, fix, "trial-kind")


def metric_problems(document: Document, trial: TrialClass) -> list[Problem]:
    """A problem where the trial does not report ``searcher.metric``; none where its source does not show it."""
    metric = document.get(METRIC)
    if not isinstance(metric, str) or reports(trial, metric) is not False:
        return []
    known = _reported(trial)[0]
    message = f"{trial.name} does not report it at validation; it reports {', '.join(known)}"
    guess = nearest(metric, known) or (known[0] if len(known) == 1 else None)
    fix = f"write {guess}" if guess else f"use one of these, or report {metric}"
    return [document.problem(METRIC, message, fix, "metric")]


def reports(trial: TrialClass, metric: str) -> bool | None:
    """Whether a trial reports a metric at validation; None where its source does not show it."""
    names, others = _reported(trial)
    if metric in names:
        return True
    if others is not None and metric.startswith(others):
        return None
    if getattr(trial.member("validation_metrics"), "elts", None):
        return False
    beside = sources_of(trial.sources[0].file, trial.context_dir).values()
    return None if any(ADDS_METRICS.search(source.text) for source in beside) else False


def _reported(trial: TrialClass) -> tuple[list[str], str | None]:
    """The metrics that a trial reports, and what others begin with that it may report; None where there are none.

    A tuple ``validation_metrics`` has them all; a mapping has some that are reported beside those that its method of
    evaluation returns, or those of this library's classes where it defines none.
    """
    declared = trial.member("validation_metrics")
    listed = [] if declared is None else getattr(declared, "elts", None) or getattr(declared, "keys", None)
    names = [value for item in listed or [] if isinstance(value := getattr(item, "value", None), str)]
    others = None if listed is not None and len(names) == len(listed) else ""
    if declared is not None and not isinstance(declared, ast.Dict):
        return names, others
    is_plain = trial.extends[0] == "DataParallelTrial"
    methods = ("evaluate_full_dataset", "evaluate_batch", *(["evaluate"] if is_plain else []))
    method = next(filter(None, map(trial.member, methods)), None)
    returned, prefix = ["validation_loss"], None
    if method is not None or not (is_plain or trial.extends[0] == "PipelineTrial"):
        returned = _returned_keys(method)
        prefix = None if returned else ""
    elif is_plain:
        keys = _returned_keys(trial.member("loss"))
        returned, prefix = [PREFIX + key for key in keys] or returned, None if keys else PREFIX
    return [*dict.fromkeys([*returned, *names])], prefix if others is None else others


def _returned_keys(function: ast.AST | None) -> list[str]:
    """The keys of the mappings that a function returns, written out; none where not all are to be seen."""
    nodes = ast.walk(function) if isinstance(function, ast.FunctionDef) else ()
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    keys = [getattr(key, "value", None) for value in returned for key in getattr(value, "keys", [None])]
    names = [key for key in keys if isinstance(key, str)]
    return names if len(names) == len(keys) else []
