"""What an experiment runs, held against the experiment: its trial or script is there, and can do what is asked of it.

The trial's class is read from its source. Where that does not show an answer, nothing is said, or a note.
"""

from __future__ import annotations

import ast
import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from determined_ds.config.layout import whole_sequences
from determined_ds.config.names import by_real_names
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import ZERO_OPTIMIZERS
from determined_ds.documents.document import Document, nearest
from determined_ds.errors import EntrypointError, Problem
from determined_ds.experiment.entrypoint import ScriptEntrypoint
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.source import (
    BY_HAND,
    UNKNOWN,
    Script,
    Source,
    SourceError,
    TrialClass,
    find_script,
    installed,
    is_inside,
    returned,
    source_of,
    string_keys,
    text_of,
)

METRIC = ("searcher", "metric")
AUTOTP = ("tensor_parallel", "autotp_size")
PREFIX = "validation_"  # of every name that DataParallelTrial.evaluate makes
# What a trial reports that is measured (runtime/loop/measured_loop.py).
MEASURED = ("samples_per_second", "step_seconds", "peak_memory_gib", "loss", "tokens_per_second", "batches")

# ------------------------------------------------------------------------------------------- what is run


def check_entrypoint(experiment: Experiment, context_dir: Path, *, option: str = "") -> None:
    """Check, without importing it, what an experiment runs.

    Args:
        experiment: It.
        context_dir: The folder with the code.
        option: One of a command that a script can honour with this library alone: ``--test`` or ``--measure``.

    Raises:
        EntrypointError: it is not there, or cannot run here.
    """
    script = experiment.script
    if script is None:
        check_trial(experiment.trial, context_dir, experiment.document)
        return
    found = check_script(script, context_dir, experiment.document)
    if found is None:
        return
    if missing := missing_imports(found, experiment):
        raise EntrypointError(missing)
    if option and not found.may_use_library:
        raise EntrypointError(without_library(script, option))


def missing_imports(script: Script, experiment: Experiment) -> list[Problem]:
    """What a script imports that is not here; nothing where the experiment's environment says where modules are."""
    states_path = "PYTHONPATH" in str(experiment.config.get("environment"))
    return [] if states_path else script.missing_packages()


def check_trial(trial: str, context_dir: Path, document: Document) -> None:
    """Check, without importing it, that the context directory has the entrypoint's module and class.

    A module that is not in the context directory may be installed; what is in it is left to the ranks.

    Args:
        trial: ``MODULE:CLASS``.
        context_dir: The folder with the code.
        document: The experiment, for places.

    Raises:
        EntrypointError: there is no such module, it is not Python, it imports a name of Determined's from where it
            does not exist, or it cannot have such a class.
    """
    module, _, name = trial.partition(":")
    file = source_of(module, context_dir)
    if file is None:
        if not all(part.isidentifier() for part in module.split(".")):
            fix = "write e.g. my_model.trial:MyTrial"
            _refuse(document, trial, f"{module} is not a valid module name", fix)
        _refuse_missing(document, trial, context_dir)
        return
    try:
        source = Source(file, context_dir)
    except SourceError as error:
        where = f"{file.relative_to(context_dir)}{f':{error.line}' if error.line else ''}"
        _refuse(document, trial, f"{where} {error}", f"fix {where}")
    if wrong := list(source.wrong_imports()):
        raise EntrypointError(wrong)
    if not source.may_have(name):
        guess = nearest(name, source.classes)
        fix = f"did you mean {guess}?" if guess else f"it has: {', '.join(source.classes) or 'no class'}"
        _refuse(document, trial, f"module {module} has no {name}", fix)


def check_script(script: ScriptEntrypoint, context_dir: Path, document: Document) -> Script | None:
    """Check, without importing it, that a script can run here.

    Args:
        script: Of the entrypoint.
        context_dir: The folder with the code.
        document: The experiment, for places.

    Returns:
        It; None for an installed module.

    Raises:
        EntrypointError: it is not there, is not Python, or drives training by Determined's own context.
    """
    file = find_script(script, context_dir)
    if file is None:
        _refuse_missing(document, script, context_dir)
        return None
    found = Script(file=file, context_dir=context_dir)
    try:
        problems = found.problems()
    except SourceError as error:
        where = f"{file}{f':{error.line}' if error.line else ''}"
        _refuse(document, script, f"{where} {error}", f"fix {where}")
    if problems:
        raise EntrypointError(problems)
    return found


def without_library(script: ScriptEntrypoint, option: str) -> Problem:
    """The problem of ``--test`` or ``--measure`` for a script of which nothing of this library sees a step."""
    if option == "--test":
        message = f"{script.name} trains by a loop of its own, which cannot be shortened to one batch"
        fix = "train by determined_ds.deepspeed.Trainer or determined_ds.session in it; or leave --test out, and have "
        fix += "the script train less by its arguments"
    else:
        message = (
            f"{script.name} trains without determined_ds.session() or DetCallback, so no step is measured"
        )
        fix = "train by determined_ds.session(), determined_ds.deepspeed.Trainer, or transformers' Trainer with "
        fix += "determined_ds.transformers.DetCallback in it"
    return Problem(key=option, message=message, fix=fix, code=option.removeprefix("--"))


def _refuse_missing(document: Document, stated: str | ScriptEntrypoint, context_dir: Path) -> None:
    """Refuse a module or a file that the context directory does not have; a module may be installed."""
    patterns = ["*.py", "*/trial.py", "*/*/trial.py"] if isinstance(stated, str) else ["*.py", "*/*.py"]
    name = stated.partition(":")[0] if isinstance(stated, str) else stated.name
    is_module = isinstance(stated, str) or stated.is_module
    first = name.split(".")[0]
    if is_module and not is_inside(first, context_dir) and installed(first) is not None:
        return
    files = sorted(str(file.relative_to(context_dir)) for form in patterns for file in context_dir.glob(form))
    there = [file.removesuffix(".py").replace("/", ".") for file in files] if is_module else files
    guess = nearest(name, there)
    fix = f"there are: {', '.join(there[:12])}" if there else f"is {context_dir} the right CONTEXT_DIR?"
    message = f"the context directory has no {'module' if is_module else 'file'} {name}"
    _refuse(document, stated, message, f"did you mean {guess}?" if guess else fix)


def _refuse(document: Document, stated: object, message: str, fix: str) -> NoReturn:
    raise EntrypointError(document.problem(("entrypoint",), message, fix, "entrypoint", value=str(stated)))


# ------------------------------------------------------------------------------------------- its kind


def has_stages(trial: TrialClass) -> bool | None:
    """Whether a trial can be cut into pipeline stages; None where its source does not show it."""
    if "PipelineTrial" in trial.order:
        return True
    return False if trial.library in ("DataParallelTrial", "SeveralEnginesTrial") else None


def builds_engine_by_hand(trial: TrialClass) -> bool | None:
    """Whether a trial calls ``deepspeed.initialize`` itself, as it extends no class of this library; None: unknown."""
    return trial.library == BY_HAND if trial.library else None


def computes_on_slices(trial: TrialClass) -> bool | None:
    """Whether a trial takes slices of sequences; None where its source does not show it."""
    stated = trial.member("sequence_parallel")
    if stated is None:
        return False if trial.library not in (UNKNOWN, BY_HAND) else None
    return bool(stated.node.value) if isinstance(stated.node, ast.Constant) else None


def stages_problem(hyperparameters: Document, trial: TrialClass) -> Problem | None:
    """The problem of pipeline stages in a trial that has none; None without a pipeline, or where that is unknown."""
    path = ("pipe_parallel_size",)
    hyperparameters = by_real_names(hyperparameters).hyperparameters
    stages = hyperparameters.get(path)
    if not isinstance(stages, int) or stages <= 1 or has_stages(trial) is not False:
        return None
    message = f"{trial.name} is not a PipelineTrial, so it has no stages"
    fix = "set pipe_parallel_size to 1, or name a PipelineTrial in the entrypoint"
    return hyperparameters.problem(path, message, fix, "trial-kind")


# ------------------------------------------------------------------------------------------- at a point


def trial_problems(trial: TrialClass, hyperparameters: Document, resolved: ResolvedConfig) -> list[Problem]:
    """What a trial's source shows that it cannot run with.

    Args:
        trial: It.
        hyperparameters: Of the point, for places.
        resolved: What they become.

    Source: ``DeepSpeedEngine._configure_optimizer`` and ``_do_optimizer_sanity_check`` in deepspeed 0.19.8's
    ``runtime/engine.py``; ``initialize`` in its ``__init__.py``, which takes no unit of AutoTP's beside a pipeline.
    """
    found, ds, topology = [], resolved.ds, resolved.topology
    kind, degree = ds.get(("scheduler", "type")), ds.get(AUTOTP)
    if resolved.zero_stage > 0 and (built := _built(trial, "build_optimizer")) is not None:
        source, call, named = built
        package, _, name = named.rpartition(".")
        is_torch = package in ("torch.optim", f"torch.optim.{name.lower()}")
        said = f"build_optimizer of {trial.name} returns torch.optim.{name}"
        device = ds.get(("zero_optimization", "offload_optimizer", "device"))
        is_untested = name.lower() not in ZERO_OPTIMIZERS - {"muon"}
        message = fix = ""
        if is_untested and not ds.get(("zero_allow_untested_optimizer",)):
            message = (
                f"{said}, and ZeRO stage {resolved.zero_stage} accepts only torch's Adam, AdamW and Adagrad"
            )
            fix = (
                'use AdamW, ZeRO stage 0, or add "zero_allow_untested_optimizer": true to the DeepSpeed JSON'
            )
        elif device in ("cpu", "nvme") and ds.get(("zero_force_ds_cpu_optimizer",)) is not False:
            message = f"{said}, and an offloaded optimizer must be DeepSpeed's own"
            fix = "return None, so that the one in the DeepSpeed JSON is used, or add "
            fix += '"zero_force_ds_cpu_optimizer": false'
        if is_torch and message:
            found.append(source.problem(call, message, fix, "zero-untested-optimizer"))
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
    if isinstance(degree, int) and degree > 1 and has_stages(trial):
        message = f"{trial.name} is a PipelineTrial, and AutoTP cuts whole models alone"
        fix = "extend DataParallelTrial; or remove tensor_parallel, and build layers that cut themselves"
        found.append(ds.problem(AUTOTP, message, fix, "tensor-pipeline"))
    if topology.sequence_parallel_size > 1 and computes_on_slices(trial) is False:
        origin = resolved.hyperparameters.origin(("sequence_parallel_size",))
        found.append(replace(whole_sequences(trial.name, topology.sequence_parallel_size), origin=origin))
    return found


@functools.lru_cache(maxsize=32)
def _built(trial: TrialClass, method: str) -> tuple[Source, ast.Call, str] | None:
    """The one call whose result a method returns, and the dotted name of what is imported and called, or "".

    None where a source does not show it, or where the trial builds engines in another way.
    """
    if trial.library not in ("DataParallelTrial", "PipelineTrial") or trial.member("initialize") is not None:
        return None
    own = trial.member(method)
    values = returned(own.node) if own is not None and own.node is not None else None
    call = values[0] if values and len(values) == 1 else None
    if own is None or not isinstance(call, ast.Call):
        return None
    root = call.func
    while isinstance(root, ast.Attribute):
        root = root.value
    is_imported = isinstance(root, ast.Name) and root.id in own.source.names
    return own.source, call, own.source.name_of(call.func) if is_imported else ""


# ------------------------------------------------------------------------------------------- its metrics


@dataclass(frozen=True, kw_only=True)
class ReportedMetrics:
    """What is known of a trial's validation metrics.

    Args:
        names: Those that it reports.
        prefix: It may report others that begin with this; None: it reports no others.
    """

    names: tuple[str, ...]
    prefix: str | None = None


def metric_problems(
    document: Document, trial: TrialClass, measures: bool = False
) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with ``searcher.metric``, and notes of it.

    Args:
        document: The experiment.
        trial: It.
        measures: Whether it is measured for some steps, and not trained.

    Returns:
        A problem where the trial does not report the metric; a note where its source does not show whether it does.
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
        return ReportedMetrics(names=MEASURED)
    names: tuple[str, ...] = ()
    is_all = True
    if (stated := trial.member("validation_metrics")) is not None:
        if not isinstance(stated.node, (ast.Tuple, ast.List, ast.Dict)):
            return None
        is_mapping = isinstance(stated.node, ast.Dict)
        items = stated.node.keys if isinstance(stated.node, ast.Dict) else stated.node.elts
        names = tuple(
            item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)
        )
        is_all = len(names) == len(items)
        if items and not is_mapping:
            return ReportedMetrics(names=names, prefix=None if is_all else "")
    known = None if trial.mentions("wrap_reducer") else _evaluated(trial)
    if known is None:
        return ReportedMetrics(names=names, prefix="") if names else None
    names = tuple(dict.fromkeys((*known.names, *names)))
    return ReportedMetrics(names=names, prefix=known.prefix if is_all else "")


def _evaluated(trial: TrialClass) -> ReportedMetrics | None:
    """What the evaluation of a trial reports, by the first of its own methods, or by the library's."""
    own_evaluate = ["evaluate"] if trial.library == "DataParallelTrial" else []
    for name in ["evaluate_full_dataset", "evaluate_batch", *own_evaluate]:
        if (own := trial.member(name)) is not None:
            names = _keys(own.node)
            return ReportedMetrics(names=names) if names else None
    if trial.library == "PipelineTrial":
        return ReportedMetrics(names=("validation_loss",))
    if trial.library != "DataParallelTrial":
        return None
    loss = trial.member("loss")
    if loss is not None and (names := _keys(loss.node)):
        return ReportedMetrics(names=tuple(PREFIX + key for key in names))
    annotation = getattr(loss.node, "returns", None) if loss is not None else None
    only = annotation is not None and text_of(annotation).strip("'\"").rpartition(".")[2] == "Tensor"
    return ReportedMetrics(names=("validation_loss",), prefix=None if only else PREFIX)


def _keys(function: ast.AST | None) -> tuple[str, ...] | None:
    """The keys of the mappings that a function returns; None where it returns anything else anywhere."""
    mappings = [string_keys(value) for value in (returned(function) if function is not None else None) or ()]
    if not mappings or None in mappings:
        return None
    return tuple(dict.fromkeys(key for keys in mappings for key in keys or ()))
