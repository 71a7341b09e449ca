"""The trial's class, read from its source without importing it: what it can run as, which metrics it reports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from determined_ds.config.facts import ZERO_OPTIMIZERS
from determined_ds.config.other_names import by_real_names
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.topology import whole_sequences
from determined_ds.documents.document import Document, nearest
from determined_ds.errors import Origin, Problem
from determined_ds.experiment.trial_file import dotted_name, imported_names, parsed, source_of

LIBRARY = "determined_ds"
BY_HAND = "DeepSpeedTrial"  # Determined's own class, which the library re-exports
DECLARED = "validation_metrics"
METRIC = ("searcher", "metric")
PREFIX = "validation_"  # of every name that DataParallelTrial.evaluate makes
SLICED = "sequence_parallel"  # of a class: it computes on slices of sequences
MAX_BASES = 50
# What a trial reports that is measured (runtime/loop/measured_loop.py).
MEASURED = ("samples_per_second", "step_seconds", "peak_memory_gib", "loss", "tokens_per_second", "batches")


@dataclass(frozen=True, kw_only=True)
class ReportedMetrics:
    """What is known of a trial's validation metrics.

    Args:
        names: Those that it reports.
        prefix: It may report others that begin with this; None: it reports no others.
    """

    names: tuple[str, ...]
    prefix: str | None = None

    def reports(self, metric: str) -> bool | None:
        """Whether it reports a metric; None where that is unknown."""
        if metric in self.names:
            return True
        return None if self.prefix is not None and metric.startswith(self.prefix) else False


def metric_problem(
    document: Document, trial: str, context_dir: Path, measures: bool = False
) -> Problem | None:
    """The problem of a ``searcher.metric`` that the trial does not report; None where it may report it."""
    metric, reported = document.get(METRIC), reported_metrics(trial, context_dir, measures)
    if not isinstance(metric, str) or reported is None or reported.reports(metric) is not False:
        return None
    names = ", ".join(reported.names)
    guess = nearest(metric, reported.names) or (reported.names[0] if len(reported.names) == 1 else None)
    message = f"{trial.partition(':')[2]} does not report it at validation; it reports {names}"
    fix = f"write {guess}" if guess else f"use one of {names}, or report {metric}"
    return document.problem(METRIC, message, fix, "metric")


def metric_unknown(
    document: Document, trial: str, context_dir: Path, measures: bool = False
) -> Problem | None:
    """A note where the source does not show whether the trial reports ``searcher.metric``."""
    metric, reported = document.get(METRIC), reported_metrics(trial, context_dir, measures)
    if not isinstance(metric, str) or (reported is not None and reported.reports(metric) is not None):
        return None
    name = trial.partition(":")[2]
    message = f"could not check whether {name} reports it at validation: its source does not show the names"
    fix = f'declare them in {name}, and it is checked: validation_metrics = ("{metric}",)'
    return document.problem(METRIC, message, fix, "metric-unknown")


def has_stages(trial: str, context_dir: Path) -> bool | None:
    """Whether ``MODULE:CLASS`` can be cut into pipeline stages; None where its source does not show it."""
    kinds = {"PipelineTrial": True, "DataParallelTrial": False, "SeveralEnginesTrial": False}
    return kinds.get(_library_base(trial, context_dir))


def builds_engine_by_hand(trial: str, context_dir: Path) -> bool | None:
    """Whether ``MODULE:CLASS`` calls ``deepspeed.initialize`` itself, as it extends no class of this library.

    None where its source does not show it.
    """
    library = _library_base(trial, context_dir)
    return library == BY_HAND if library else None


def stages_problem(hyperparameters: Document, trial: str) -> Problem | None:
    """The problem of a pipeline whose trial has no stages; None without a pipeline."""
    path = ("pipe_parallel_size",)
    hyperparameters = by_real_names(hyperparameters, Document(name="", data={})).hyperparameters
    stages = hyperparameters.get(path)
    if not isinstance(stages, int) or stages <= 1:
        return None
    message = f"{trial.partition(':')[2]} is not a PipelineTrial, so it has no stages"
    fix = "set pipe_parallel_size to 1, or name a PipelineTrial in the entrypoint"
    return hyperparameters.problem(path, message, fix, "trial-kind")


def computes_on_slices(trial: str, context_dir: Path) -> bool | None:
    """Whether ``MODULE:CLASS`` takes slices of sequences; None where its source does not show it."""
    for found, _ in _bases(trial, context_dir):
        if isinstance(found, str):
            return None if found == BY_HAND else False
        stated = _class_attribute(found, SLICED)
        if stated is not None:
            return bool(stated.value) if isinstance(stated, ast.Constant) else None
        if any(isinstance(node, ast.Attribute) and node.attr == SLICED for node in ast.walk(found)):
            return None
    return None


def slices_problem(
    hyperparameters: Document, trial: str, context_dir: Path, resolved: ResolvedConfig
) -> Problem | None:
    """The problem of a trial that computes on whole sequences, and is to get slices; None where no source shows it."""
    size = resolved.topology.sequence_parallel_size
    if size == 1 or computes_on_slices(trial, context_dir) is not False:
        return None
    hyperparameters = by_real_names(hyperparameters, Document(name="", data={})).hyperparameters
    origin = hyperparameters.origin(("sequence_parallel_size",))
    return replace(whole_sequences(trial.partition(":")[2], size), origin=origin)


def optimizer_problem(trial: str, context_dir: Path, resolved: ResolvedConfig) -> Problem | None:
    """The problem of a trial that builds a torch optimizer which ZeRO rejects; None where its source shows none.

    Source: ``DeepSpeedEngine._configure_optimizer`` and ``_do_optimizer_sanity_check`` in deepspeed 0.19.8's
    ``runtime/engine.py``.
    """
    built = _built_optimizer(trial, context_dir)
    if built is None or resolved.zero_stage == 0:
        return None
    name, origin = built
    ds, said = resolved.ds, f"build_optimizer of {trial.partition(':')[2]} returns torch.optim.{name}"
    device = ds.get(("zero_optimization", "offload_optimizer", "device"))
    if name.lower() not in ZERO_OPTIMIZERS - {"muon"} and not ds.get(("zero_allow_untested_optimizer",)):
        message = f"{said}, and ZeRO stage {resolved.zero_stage} accepts only torch's Adam, AdamW and Adagrad"
        fix = 'use AdamW, ZeRO stage 0, or add "zero_allow_untested_optimizer": true to the DeepSpeed JSON'
    elif device in ("cpu", "nvme") and ds.get(("zero_force_ds_cpu_optimizer",)) is not False:
        message = f"{said}, and an offloaded optimizer must be DeepSpeed's own"
        fix = 'return None, so that the one in the DeepSpeed JSON is used, or add "zero_force_ds_cpu_optimizer": false'
    else:
        return None
    return Problem(key="", origin=origin, message=message, fix=fix, code="zero-untested-optimizer")


def scheduler_problem(trial: str, context_dir: Path, resolved: ResolvedConfig) -> Problem | None:
    """The problem of a trial that always builds its own schedule, beside one in the JSON; None where none is shown."""
    kind = resolved.ds.get(("scheduler", "type"))
    if kind is None:
        return None
    found = _own_method(trial, context_dir, "build_scheduler")
    if found is None:
        return None
    own, source = found
    returned = _returned(own)
    if not returned or any(_is_none(value) for value in returned):
        return None
    origin = Origin(f"{source}:{own.lineno}", file=str(source), line=own.lineno, column=1)
    name = trial.partition(":")[2]
    message = f"build_scheduler of {name} returns a schedule, and the DeepSpeed JSON has {kind}: one must go"
    fix = "remove scheduler from the JSON, or write overwrite_deepspeed_args: {scheduler: null}"
    return Problem(key="", origin=origin, message=message, fix=fix, code="two-schedulers")


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _built_optimizer(trial: str, context_dir: Path) -> tuple[str, Origin] | None:
    """The class of ``torch.optim`` that ``build_optimizer`` returns, and where; None where no source shows it."""
    found = _own_method(trial, context_dir, "build_optimizer")
    if found is None:
        return None
    own, source = found
    returned = _returned(own)
    call, tree = returned[0] if len(returned) == 1 else None, _tree(source)
    if not isinstance(call, ast.Call) or tree is None:
        return None
    package, _, kind = dotted_name(call.func, imported_names(tree)).rpartition(".")
    if package not in ("torch.optim", f"torch.optim.{kind.lower()}"):
        return None
    place = Origin(f"{source}:{call.lineno}", file=str(source), line=call.lineno, column=call.col_offset + 1)
    return kind, place


def reported_metrics(trial: str, context_dir: Path, measures: bool = False) -> ReportedMetrics | None:
    """What ``MODULE:CLASS`` reports, trained or only measured; None where its source does not show it.

    The names are those of a class attribute ``validation_metrics``, a tuple; of the dictionary that ``evaluate`` or
    ``evaluate_batch`` returns; or those of this library's classes where it defines neither.
    """
    if measures:
        return ReportedMetrics(names=MEASURED)
    loss: ast.FunctionDef | None = None
    reductions: tuple[str, ...] = ()
    for found, _ in _bases(trial, context_dir):
        if isinstance(found, str):
            return _with(reductions, _of_library(found, loss))
        declared, is_all = _declared(found)
        if declared and is_all:
            return ReportedMetrics(names=declared)
        reductions = reductions or declared
        if any(isinstance(node, ast.Attribute) and node.attr == "wrap_reducer" for node in ast.walk(found)):
            return None
        methods = _methods(found)
        loss = loss or methods.get("loss")
        own = methods.get("evaluate") or methods.get("evaluate_batch")
        if own:
            names = _returned_keys(own)
            return _with(reductions, ReportedMetrics(names=names) if names else None)
    return _with(reductions, None)


def _with(reductions: tuple[str, ...], known: ReportedMetrics | None) -> ReportedMetrics | None:
    """With the names that a mapping declares, which need not have all of them."""
    if not reductions:
        return known
    if known is None:
        return ReportedMetrics(names=reductions, prefix="")
    return ReportedMetrics(names=tuple(dict.fromkeys((*known.names, *reductions))), prefix=known.prefix)


def _of_library(name: str, loss: ast.FunctionDef | None) -> ReportedMetrics | None:
    """What the classes of this library report by themselves."""
    if name == "PipelineTrial":
        return ReportedMetrics(names=("validation_loss",))
    if name != "DataParallelTrial":
        return None
    returned = _returned_keys(loss) if loss else ()
    if returned:
        return ReportedMetrics(names=tuple(PREFIX + key for key in returned))
    only = loss is not None and isinstance(loss.returns, (ast.Name, ast.Attribute)) and _last(loss.returns)
    return ReportedMetrics(names=("validation_loss",), prefix=None if only == "Tensor" else PREFIX)


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _declared(found: ast.ClassDef) -> tuple[tuple[str, ...], bool]:
    """The names that a class declares, and whether they are all: a mapping may leave out means."""
    value = _class_attribute(found, DECLARED)
    items: list[ast.expr | None] = []
    if isinstance(value, ast.Dict):
        items += value.keys
    elif isinstance(value, (ast.Tuple, ast.List)):
        items += value.elts
    constants = [item.value for item in items if isinstance(item, ast.Constant)]
    names = tuple(name for name in constants if type(name) is str)
    return names, not isinstance(value, ast.Dict)


def _class_attribute(found: ast.ClassDef, name: str) -> ast.expr | None:
    """What a class sets an attribute to in its body; None where it does not."""
    for node in found.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value: ast.expr | None = getattr(node, "value", None)
            return value
    return None


def _returned_keys(function: ast.FunctionDef) -> tuple[str, ...]:
    """The keys of the dictionary that a function returns; () where it returns anything else anywhere."""
    returned = _returned(function)
    keys = [key for value in returned for key in (value.keys if isinstance(value, ast.Dict) else [None])]
    names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return tuple(dict.fromkeys(names)) if len(names) == len(keys) else ()


def _returned(function: ast.FunctionDef) -> list[ast.expr | None]:
    return [node.value for node in _own_nodes(function) if isinstance(node, ast.Return)]


def _methods(found: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Everything in a function but the functions inside it."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))


def _own_method(trial: str, context_dir: Path, name: str) -> tuple[ast.FunctionDef, Path] | None:
    """The nearest definition of a method, and its file; None where it is this library's, or no source shows it."""
    for found, source in _bases(trial, context_dir):
        if isinstance(found, str) or source is None:
            return None
        if name in (methods := _methods(found)):
            return methods[name], source
    return None


def _library_base(trial: str, context_dir: Path) -> str:
    """The class of this library that ``MODULE:CLASS`` extends; "" where its source does not show one."""
    return next((found for found, _ in _bases(trial, context_dir) if isinstance(found, str)), "")


def _bases(trial: str, context_dir: Path) -> Iterator[tuple[ast.ClassDef | str, Path | None]]:
    """A class and its bases with their files, nearest first; the name of a class of this library ends it."""
    todo = [trial.replace(":", ".")]
    for _ in range(MAX_BASES):
        if not todo:
            return
        module, _, name = todo.pop(0).rpartition(".")
        package = module.split(".")[0]
        if package == LIBRARY and name == "ReconciledTrial" and todo:  # it shows nothing; another base may
            continue
        if package == LIBRARY or (package == "determined" and name == BY_HAND):
            yield name, None
            return
        source = source_of(module, context_dir)
        tree = _tree(source)
        if source is None or tree is None:
            return
        imported = imported_names(tree, module if source.name == "__init__.py" else module.rpartition(".")[0])
        own = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
        if own is not None:
            yield own, source
            bases = [dotted_name(base, imported) for base in own.bases]
            todo[:0] = [base if "." in base else f"{module}.{base}" for base in bases]
        elif name in imported:
            todo.insert(0, imported[name])
        else:
            return


def _tree(source: Path | None) -> ast.Module | None:
    if source is None:
        return None
    try:
        return parsed(source.read_bytes())
    except (OSError, SyntaxError, ValueError):  # reported where the entrypoint is checked
        return None
