"""What an experiment runs, held against the experiment: its code is there, and can do what is asked of it.

The code is read, never imported. Where its source does not show an answer, nothing is said, or a note.
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from determined_ds.config.layout import whole_sequences
from determined_ds.config.params import by_real_names
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import ZERO_OPTIMIZERS
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
AUTOTP = ("tensor_parallel", "autotp_size")
PREFIX = "validation_"  # of every name that DataParallelTrial.evaluate makes
# What a trial reports that is measured (train/loop).
MEASURED = ("samples_per_second", "step_seconds", "peak_memory_gib", "loss", "tokens_per_second", "batches")

# ------------------------------------------------------------------------------------------- what is run


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

    Args:
        experiment: It.
        context_dir: The folder with the code.
    """
    entrypoint, file = experiment.entrypoint, find_code(experiment.entrypoint, context_dir)
    module, _, name = experiment.trial.partition(":")
    is_module = not isinstance(entrypoint, ScriptEntrypoint) or entrypoint.is_module

    def refused(message: str, fix: str) -> tuple[list[Problem], list[Problem]]:
        stated = str(entrypoint)
        return [experiment.document.problem(("entrypoint",), message, fix, "entrypoint", value=stated)], []

    if file is None:
        wanted = module if experiment.script is None else experiment.script.name
        first = wanted.split(".")[0]
        if module and not all(part.isidentifier() for part in module.split(".")):
            return refused(f"{module} is not a valid module name", "write e.g. my_model.trial:MyTrial")
        if is_module and not is_inside(first, context_dir) and installed(first) is not None:
            return [], []
        forms = ("*.py", "*/trial.py", "*/*/trial.py") if module else ("*.py", "*/*.py")
        files = {str(each.relative_to(context_dir)) for form in forms for each in context_dir.glob(form)}
        there = sorted(files)
        if is_module:
            there = [each.removesuffix(".py").replace("/", ".") for each in there]
        guess = nearest(wanted, there)
        fix = f"there are: {', '.join(there[:12])}" if there else f"is {context_dir} the right CONTEXT_DIR?"
        message = f"the context directory has no {'module' if is_module else 'file'} {wanted}"
        return refused(message, f"did you mean {guess}?" if guess else fix)
    try:
        if experiment.script:
            return [], [*Script(file=file, context_dir=context_dir).own_drivers()]
        source = Source(file, context_dir)
    except SourceError as error:
        where = f"{file.relative_to(context_dir)}{f':{error.line}' if error.line else ''}"
        return refused(f"{where} {error}", f"fix {where}")
    if not source.may_have(name):
        guess, classes = nearest(name, source.classes), ", ".join(source.classes) or "no class"
        fix = f"did you mean {guess}?" if guess else f"it has: {classes}"
        return refused(f"module {module} has no {name}", fix)
    return [], []


def without_library(script: ScriptEntrypoint, option: str) -> Problem:
    """The problem of ``--test`` or ``--measure`` for a script of which nothing of this library sees a step."""
    message = f"{script.name} trains without determined_ds.session(), so no step is measured"
    fix = "train by determined_ds.session() or determined_ds.deepspeed.Trainer in it"
    if option == "--test":
        message = f"{script.name} trains by a loop of its own, which cannot be shortened to one batch"
        fix = "train by determined_ds.deepspeed.Trainer or determined_ds.session in it; or leave --test out, and have "
        fix += "the script train less by its arguments"
    return Problem(key=option, message=message, fix=fix, code=option.removeprefix("--"))


# ------------------------------------------------------------------------------------------- at a point


def stages_problem(hyperparameters: Document, trial: TrialClass) -> Problem | None:
    """The problem of pipeline stages in a trial that has none; None without a pipeline, or where that is unknown."""
    path = ("pipe_parallel_size",)
    hyperparameters = by_real_names(hyperparameters)[0]
    stages = hyperparameters.get(path)
    if not isinstance(stages, int) or stages <= 1 or trial.has_stages is not False:
        return None
    message = f"{trial.name} is not a PipelineTrial, so it has no stages"
    fix = "set pipe_parallel_size to 1, or name a PipelineTrial in the entrypoint"
    return hyperparameters.problem(path, message, fix, "trial-kind")


def trial_problems(trial: TrialClass, hyperparameters: Document, resolved: ResolvedConfig) -> list[Problem]:
    """What a trial's source shows that it cannot run with at a point.

    Source: ``DeepSpeedEngine._configure_optimizer`` and ``_do_optimizer_sanity_check`` in deepspeed 0.19.8's
    ``runtime/engine.py``; ``initialize`` in its ``__init__.py``, which takes no unit of AutoTP's beside a pipeline.
    """
    found, ds, stage = [], resolved.ds, resolved.zero_stage
    if stage > 0 and (built := _built(trial, "build_optimizer")) is not None:
        source, call, named = built
        package, _, name = named.rpartition(".")
        message, said = "", f"build_optimizer of {trial.name} returns torch.optim.{name}"
        is_untested = name.lower() not in ZERO_OPTIMIZERS - {"muon"}
        is_offloaded = ds.get(("zero_optimization", "offload_optimizer", "device")) in ("cpu", "nvme")
        if is_untested and not ds.get(("zero_allow_untested_optimizer",)):
            message = f"{said}, and ZeRO stage {stage} accepts only torch's Adam, AdamW and Adagrad"
            fix = (
                'use AdamW, ZeRO stage 0, or add "zero_allow_untested_optimizer": true to the DeepSpeed JSON'
            )
        elif is_offloaded and ds.get(("zero_force_ds_cpu_optimizer",)) is not False:
            message = f"{said}, and an offloaded optimizer must be DeepSpeed's own"
            fix = 'return None, so that the JSON\'s is used, or add "zero_force_ds_cpu_optimizer": false'
        if message and package in ("torch.optim", f"torch.optim.{name.lower()}"):
            found.append(source.problem(call, message, fix, "zero-untested-optimizer"))
    kind = ds.get(("scheduler", "type"))
    if kind is not None and (built := _built(trial, "build_scheduler")) is not None:
        source, call, named = built
        package = named.split(".")[0]
        # A function of the author's may return None.
        if package and package not in sys.stdlib_module_names and not is_inside(package, trial.context_dir):
            message = (
                f"build_scheduler of {trial.name} returns a schedule beside the JSON's {kind}: one must go"
            )
            fix = "remove scheduler from the JSON, or write overwrite_deepspeed_args: {scheduler: null}"
            found.append(source.problem(call, message, fix, "two-schedulers"))
    degree, sharing = ds.get(AUTOTP), resolved.topology.sequence_parallel_size
    if isinstance(degree, int) and degree > 1 and trial.has_stages:
        message = f"{trial.name} is a PipelineTrial, and AutoTP cuts whole models alone"
        fix = "extend DataParallelTrial; or remove tensor_parallel, and build layers that cut themselves"
        found.append(ds.problem(AUTOTP, message, fix, "tensor-pipeline"))
    if sharing > 1 and trial.computes_on_slices is False:
        origin = resolved.hyperparameters.origin(("sequence_parallel_size",))
        found.append(replace(whole_sequences(trial.name, sharing), origin=origin))
    return found


@functools.lru_cache(maxsize=32)
def _built(trial: TrialClass, method: str) -> tuple[Source, ast.Call, str] | None:
    """The one call whose result a method returns, and the dotted name of what is imported and called, or "".

    None where a source does not show it, or where the trial builds engines in another way.
    """
    own = trial.member(method)
    if (
        own is None
        or trial.library not in ("DataParallelTrial", "PipelineTrial")
        or trial.member("initialize")
    ):
        return None
    [call, *others] = returned(own.node) or [None]
    if not isinstance(call, ast.Call) or others:
        return None
    root = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    is_imported = isinstance(root, ast.Name) and root.id in own.source.names
    return own.source, call, own.source.name_of(call.func) if is_imported else ""


# ------------------------------------------------------------------------------------------- its metrics


class ReportedMetrics(NamedTuple):
    """What is known of a trial's validation metrics."""

    names: tuple[str, ...]
    prefix: str | None = None  # it may report others that begin with this; None: it reports no others


def metric_problems(
    document: Document, trial: TrialClass, measures: bool = False
) -> tuple[list[Problem], list[Problem]]:
    """A problem where the trial does not report ``searcher.metric``; a note where its source does not show it.

    ``measures``: it is measured for some steps, and not trained.
    """
    metric, reported = document.get(METRIC), reported_metrics(trial, measures)
    if not isinstance(metric, str) or (reported is not None and metric in reported.names):
        return [], []
    is_open = reported is None or (reported.prefix is not None and metric.startswith(reported.prefix))
    if not is_open and not measures and trial.member("validation_metrics") is None:  # else they are declared
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
    """What a trial reports, trained or only measured; None where its source does not show it.

    The names are those of its attribute ``validation_metrics``, a tuple; of the dictionary that its method of
    evaluation returns; or those of this library's classes where it defines none. Names in a mapping
    ``validation_metrics`` are reported beside those.
    """
    if measures:
        return ReportedMetrics(MEASURED)
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
    known = None if trial.mentions("wrap_reducer") else _evaluated(trial)
    if known is None:
        return ReportedMetrics(names, "") if names else None
    return ReportedMetrics(tuple(dict.fromkeys((*known.names, *names))), known.prefix if is_all else "")


def _evaluated(trial: TrialClass) -> ReportedMetrics | None:
    """What the evaluation of a trial reports, by the first of its own methods, or by the library's."""
    is_plain = trial.library == "DataParallelTrial"
    for name in ("evaluate_full_dataset", "evaluate_batch", *["evaluate"] * is_plain):
        if (own := trial.member(name)) is not None:
            names = _returned_keys(own.node)
            return ReportedMetrics(names) if names else None
    if not is_plain:
        return ReportedMetrics(("validation_loss",)) if trial.library == "PipelineTrial" else None
    loss = trial.member("loss")
    if loss is not None and (names := _returned_keys(loss.node)):
        return ReportedMetrics(tuple(PREFIX + key for key in names))
    annotation = getattr(loss.node, "returns", None) if loss is not None else None
    only = annotation is not None and text_of(annotation).strip("'\"").rpartition(".")[2] == "Tensor"
    return ReportedMetrics(("validation_loss",), None if only else PREFIX)


def _returned_keys(function: ast.AST | None) -> tuple[str, ...]:
    """The keys of the mappings that a function returns, written out; none where not all are to be seen."""
    found: list[str] = []
    for value in returned(function) or ():
        keys: list[object] = [None]
        if isinstance(value, ast.Dict):
            keys = [getattr(key, "value", None) for key in value.keys]
        elif isinstance(value, ast.Call) and text_of(value.func) == "dict":
            keys = [*(each.arg for each in value.keywords), *(None for _ in value.args)]
        if not all(isinstance(key, str) for key in keys):
            return ()
        found += map(str, keys)
    return tuple(dict.fromkeys(found))
