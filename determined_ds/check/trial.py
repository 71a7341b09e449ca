"""What an experiment runs, held against the experiment: its code is there, and can do what is asked of it.

The code is read, never imported. Where its source does not show an answer, nothing is said, or a note.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from determined_ds.config.layout import whole_sequences
from determined_ds.config.params import by_real_names
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.documents.document import Document, nearest
from determined_ds.errors import EntrypointError, Problem
from determined_ds.experiment.entrypoint import ScriptEntrypoint
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.source import (
    Script,
    Source,
    SourceError,
    TrialClass,
    find_code,
    installed,
    is_inside,
    returned,
    text_of,
)

METRIC = ("searcher", "metric")
PREFIX = "validation_"  # of every name that DataParallelTrial.evaluate makes


def check_entrypoint(experiment: Experiment, context_dir: Path, *, option: str = "") -> None:
    """Check, without importing it, that what an experiment runs is there and can run here.

    Args:
        experiment: It.
        context_dir: The folder with the code.
        option: One of a command that a script can honour with this library alone: ``--test`` or ``--measure``.

    Raises:
        EntrypointError: it is not there, or cannot run here.
    """
    anywhere, here = code_problems(experiment, context_dir)
    script, file = experiment.script, find_code(experiment.entrypoint, context_dir)
    if anywhere or here:
        raise EntrypointError([*anywhere, *here])
    if option and script and file and not Script(file=file, context_dir=context_dir).may_use_library:
        raise EntrypointError(without_library(script, option))


def code_problems(experiment: Experiment, context_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Why what an experiment runs cannot run anywhere, and why not here, though it may on a cluster.

    A module that is not in the context directory may be installed; what is in it is left to the ranks.
    """
    entrypoint, file = experiment.entrypoint, find_code(experiment.entrypoint, context_dir)
    module, _, name = experiment.trial.partition(":")
    try:
        if file is not None and experiment.script:
            return [], [*Script(file=file, context_dir=context_dir).own_drivers()]
        source = Source(file, context_dir) if file is not None else None
    except SourceError as error:
        where = f"{file.relative_to(context_dir)}{f':{error.line}' if error.line else ''}" if file else ""
        message, wanted, there, fix = f"{where} {error}", "", [], f"fix {where}"
    else:
        if source is not None and source.may_have(name):
            return [], []
        if source is not None:
            message, wanted, there = f"module {module} has no {name}", name, source.classes
            fix = f"it has: {', '.join(there) or 'no class'}"
        else:
            is_module = not isinstance(entrypoint, ScriptEntrypoint) or entrypoint.is_module
            wanted = module if experiment.script is None else experiment.script.name
            first = wanted.split(".")[0]
            if is_module and not is_inside(first, context_dir) and installed(first) is not None:
                return [], []
            files = {file for form in ("*.py", "*/*.py", "*/*/trial.py") for file in context_dir.glob(form)}
            there = sorted(str(file.relative_to(context_dir)) for file in files)
            if is_module:
                there = [each.removesuffix(".py").replace("/", ".") for each in there]
            fix = (
                f"there are: {', '.join(there[:12])}" if there else f"is {context_dir} the right CONTEXT_DIR?"
            )
            message = f"the context directory has no {'module' if is_module else 'file'} {wanted}"
    guess = nearest(wanted, there)
    fix = f"did you mean {guess}?" if guess else fix
    stated = str(entrypoint)
    return [experiment.document.problem(("entrypoint",), message, fix, "entrypoint", value=stated)], []


def without_library(script: ScriptEntrypoint, option: str) -> Problem:
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


def trial_problems(trial: TrialClass, hyperparameters: Document, resolved: ResolvedConfig) -> list[Problem]:
    """What a trial's source shows that it cannot run with: slices of sequences, where it takes whole ones."""
    sharing = resolved.topology.sequence_parallel_size
    if sharing == 1 or trial.computes_on_slices is not False:
        return []
    origin = resolved.hyperparameters.origin(("sequence_parallel_size",))
    return [replace(whole_sequences(trial.name, sharing), origin=origin)]


class ReportedMetrics(NamedTuple):
    """What is known of a trial's validation metrics."""

    names: tuple[str, ...]
    prefix: str | None = None  # it may report others that begin with this; None: it reports no others


def metric_problems(
    document: Document, trial: TrialClass, measures: bool = False
) -> tuple[list[Problem], list[Problem]]:
    """A problem where the trial does not report ``searcher.metric``; a note where its source does not show it.

    ``measures``: it is measured for some steps, and not trained, and reports what that gives.
    """
    metric, reported = document.get(METRIC), reported_metrics(trial, measures)
    if not isinstance(metric, str) or measures or (reported is not None and metric in reported.names):
        return [], []
    is_open = reported is None or (reported.prefix is not None and metric.startswith(reported.prefix))
    if not is_open and trial.member("validation_metrics") is None:  # else they are declared
        is_open = trial.mentions("wrap_reducer", "on_validation_end", everywhere=True)
    if reported is None or is_open:
        message = f"could not check whether {trial.name} reports it at validation: its source does not show the names"
        fix = f'declare them in {trial.name}, and it is checked: validation_metrics = ("{metric}",)'
        return [], [document.problem(METRIC, message, fix, "metric-unknown")]
    names = ", ".join(reported.names)
    guess = nearest(metric, reported.names) or (reported.names[0] if len(reported.names) == 1 else None)
    message = f"{trial.name} does not report it at validation; it reports {names}"
    fix = f"write {guess}" if guess else f"use one of {names}, or report {metric}"
    return [document.problem(METRIC, message, fix, "metric")], []


def reported_metrics(trial: TrialClass, measures: bool = False) -> ReportedMetrics | None:
    """What a trial reports; None where its source does not show it, or where it is only measured.

    The names are those of its attribute ``validation_metrics``, a tuple; of the dictionary that its method of
    evaluation returns; or those of this library's classes where it defines none. Names in a mapping
    ``validation_metrics`` are reported beside those.
    """
    if measures:
        return None
    names: tuple[str, ...] = ()
    is_all = True
    if (stated := trial.member("validation_metrics")) is not None:
        node = stated.node
        if not isinstance(node, (ast.Tuple, ast.List, ast.Dict)):
            return None
        listed = node.keys if isinstance(node, ast.Dict) else node.elts
        items = [getattr(item, "value", None) for item in listed]
        names = tuple(item for item in items if isinstance(item, str))
        is_all = len(names) == len(items)
        if items and not isinstance(node, ast.Dict):
            return ReportedMetrics(names, None if is_all else "")
    is_plain, known = trial.library == "DataParallelTrial", None
    methods = ("evaluate_full_dataset", "evaluate_batch", *["evaluate"] * is_plain)
    own = next(filter(None, map(trial.member, methods)), None)
    if own is not None:
        known = ReportedMetrics(found) if (found := _returned_keys(own.node)) else None
    elif trial.library == "PipelineTrial":
        known = ReportedMetrics(("validation_loss",))
    elif is_plain and (loss := trial.member("loss")) is not None:
        keys = tuple(PREFIX + key for key in _returned_keys(loss.node))
        annotation = getattr(loss.node, "returns", None)
        only = annotation is not None and text_of(annotation).strip("'\"").rpartition(".")[2] == "Tensor"
        known = ReportedMetrics(keys or ("validation_loss",), None if keys or only else PREFIX)
    elif is_plain:
        known = ReportedMetrics(("validation_loss",), PREFIX)
    if known is None or trial.mentions("wrap_reducer"):
        return ReportedMetrics(names, "") if names else None
    return ReportedMetrics(tuple(dict.fromkeys((*known.names, *names))), known.prefix if is_all else "")


def _returned_keys(function: ast.AST | None) -> tuple[str, ...]:
    """The keys of the mappings that a function returns, written out; none where not all are to be seen."""
    found: list[str] = []
    for value in returned(function) or ():
        keys = [getattr(key, "value", None) for key in value.keys] if isinstance(value, ast.Dict) else [None]
        if not all(isinstance(key, str) for key in keys):
            return ()
        found += map(str, keys)
    return tuple(dict.fromkeys(found))
