"""The trial's class, read from its source without importing it: what it can run as, which metrics it reports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from determined_ds.config.facts import ZERO_OPTIMIZERS
from determined_ds.config.other_names import by_real_names
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.documents.document import Document, nearest
from determined_ds.errors import Origin, Problem
from determined_ds.experiment.trial_file import dotted_name, imported_names, parsed, source_of

LIBRARY = "determined_ds"
BY_HAND = "DeepSpeedTrial"  # Determined's own class, which the library hands on
DECLARED = "validation_metrics"
PREFIX = "validation_"  # of every name that DataParallelTrial.evaluate makes
MAX_BASES = 50
# What a trial reports that is measured (runtime/loop/measured_loop.py).
MEASURED = ("samples_per_second", "step_seconds", "peak_memory_gib", "loss", "tokens_per_second", "batches")


@dataclass(frozen=True, kw_only=True)
class ReportedMetrics:
    """What is known of a trial's validation metrics.

    Args:
        names: Those that it surely reports.
        prefix: Any other begins so; None where there is no other.
    """

    names: tuple[str, ...]
    prefix: str | None = None


def metric_problem(
    document: Document, trial: str, context_dir: Path, measures: bool = False
) -> Problem | None:
    """The problem of a ``searcher.metric`` that the trial does not report; None where it may well do so."""
    path = ("searcher", "metric")
    metric = document.get(path)
    reported = reported_metrics(trial, context_dir, measures)
    if not isinstance(metric, str) or reported is None or metric in reported.names:
        return None
    if reported.prefix is not None and metric.startswith(reported.prefix):
        return None
    names = ", ".join(reported.names)
    guess = nearest(metric, reported.names) or (reported.names[0] if len(reported.names) == 1 else None)
    return Problem(
        key="searcher.metric",
        value=metric,
        origin=document.origin(path),
        message=f"{trial.partition(':')[2]} does not report it at validation; it reports {names}",
        fix=f"write {guess}" if guess else f"use one of {names}, or report {metric}",
        code="metric",
    )


def metric_unknown(
    document: Document, trial: str, context_dir: Path, measures: bool = False
) -> Problem | None:
    """A note where nobody can tell whether the trial reports ``searcher.metric``; None where that is known."""
    path = ("searcher", "metric")
    metric = document.get(path)
    reported = reported_metrics(trial, context_dir, measures)
    if not isinstance(metric, str):
        return None
    if reported is not None and (
        metric in reported.names or reported.prefix is None or not metric.startswith(reported.prefix)
    ):
        return None
    name = trial.partition(":")[2]
    return Problem(
        key="searcher.metric",
        value=metric,
        origin=document.origin(path),
        message=f"could not tell whether {name} reports it at validation: its source does not show the names",
        fix=f'declare them in {name}, and it is checked: validation_metrics = ("{metric}",)',
        code="metric-unknown",
    )


def has_stages(trial: str, context_dir: Path) -> bool | None:
    """Whether ``MODULE:CLASS`` can be cut into pipeline stages; None where its source does not tell."""
    module, _, name = trial.partition(":")
    library = next((found for found in _bases(module, name, context_dir) if isinstance(found, str)), None)
    return {"PipelineTrial": True, "DataParallelTrial": False, "SeveralEnginesTrial": False}.get(
        library or ""
    )


def builds_engine_by_hand(trial: str, context_dir: Path) -> bool | None:
    """Whether ``MODULE:CLASS`` calls ``deepspeed.initialize`` itself: it extends no class of this library.

    None where its source does not tell.
    """
    module, _, name = trial.partition(":")
    library = next((found for found in _bases(module, name, context_dir) if isinstance(found, str)), None)
    return None if library is None else library == BY_HAND


def stages_problem(hyperparameters: Document, trial: str) -> Problem | None:
    """The problem of a pipeline whose trial has no stages; None where no pipeline is asked for."""
    path = ("pipe_parallel_size",)
    hyperparameters = by_real_names(hyperparameters, Document(name="", data={})).hyperparameters
    stages = hyperparameters.get(path)
    if not isinstance(stages, int) or stages <= 1:
        return None
    return Problem(
        key=hyperparameters.key(path),
        value=stages,
        origin=hyperparameters.origin(path),
        message=f"{trial.partition(':')[2]} has no stages: it is no PipelineTrial",
        fix="set pipe_parallel_size to 1, or name a PipelineTrial in the entrypoint",
        code="trial-kind",
    )


def optimizer_problem(trial: str, context_dir: Path, resolved: ResolvedConfig) -> Problem | None:
    """The problem of a trial that builds an optimizer of torch's which ZeRO does not take; None where none is seen.

    Source: ``DeepSpeedEngine._configure_optimizer`` and ``_do_optimizer_sanity_check`` in deepspeed 0.19.8's
    ``runtime/engine.py``.
    """
    built = _built_optimizer(trial, context_dir)
    if built is None or resolved.zero_stage == 0:
        return None
    name, origin = built
    ds, said = resolved.ds, f"build_optimizer of {trial.partition(':')[2]} makes torch.optim.{name}"
    device = ds.get(("zero_optimization", "offload_optimizer", "device"))
    if name.lower() not in ZERO_OPTIMIZERS - {"muon"} and not ds.get(("zero_allow_untested_optimizer",)):
        message = f"{said}, and ZeRO stage {resolved.zero_stage} takes Adam, AdamW and Adagrad of torch's"
        fix = 'use AdamW, ZeRO stage 0, or add "zero_allow_untested_optimizer": true to the DeepSpeed JSON'
    elif device in ("cpu", "nvme") and ds.get(("zero_force_ds_cpu_optimizer",)) is not False:
        message = f"{said}, and an offloaded optimizer must be DeepSpeed's own"
        fix = 'return None, so that the one in the DeepSpeed JSON is used, or add "zero_force_ds_cpu_optimizer": false'
    else:
        return None
    return Problem(key="", origin=origin, message=message, fix=fix, code="zero-untested-optimizer")


def _built_optimizer(trial: str, context_dir: Path) -> tuple[str, Origin] | None:
    """Name in ``torch.optim`` of what ``build_optimizer`` returns, and where; None where its source does not tell."""
    module, _, name = trial.partition(":")
    for found, source in _bases_and_files(module, name, context_dir):
        if isinstance(found, str) or source is None:
            return None
        methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
        own, tree = methods.get("build_optimizer"), _tree(source)
        if own is None or tree is None:
            continue
        returned = [node.value for node in _own_nodes(own) if isinstance(node, ast.Return)]
        call = returned[0] if len(returned) == 1 else None
        dotted = dotted_name(call.func, imported_names(tree)) if isinstance(call, ast.Call) else ""
        package, _, kind = dotted.rpartition(".")
        if call is None or package not in ("torch.optim", f"torch.optim.{kind.lower()}"):
            return None
        place = Origin(
            f"{source}:{call.lineno}", file=str(source), line=call.lineno, column=call.col_offset + 1
        )
        return kind, place
    return None


def reported_metrics(trial: str, context_dir: Path, measures: bool = False) -> ReportedMetrics | None:
    """What ``MODULE:CLASS`` reports, trained or only measured; None where its source does not tell.

    A trial tells by a class attribute ``validation_metrics``, a tuple of names; by the dictionary that its
    ``evaluate`` or ``evaluate_batch`` returns; or by leaving both to this library's classes.
    """
    if measures:
        return ReportedMetrics(names=MEASURED)
    module, _, name = trial.partition(":")
    loss: ast.FunctionDef | None = None
    for found in _bases(module, name, context_dir):
        if isinstance(found, str):
            return _of_library(found, loss)
        declared = _declared(found)
        if declared:
            return ReportedMetrics(names=declared)
        if any(isinstance(node, ast.Attribute) and node.attr == "wrap_reducer" for node in ast.walk(found)):
            return None
        methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
        loss = loss or methods.get("loss")
        own = methods.get("evaluate") or methods.get("evaluate_batch")
        if own:
            names = _returned_keys(own)
            return ReportedMetrics(names=names) if names else None
    return None


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


def _declared(found: ast.ClassDef) -> tuple[str, ...]:
    for node in found.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        if any(isinstance(target, ast.Name) and target.id == DECLARED for target in targets):
            value = getattr(node, "value", None)
            items = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            names = [
                item.value for item in items if isinstance(item, ast.Constant) and type(item.value) is str
            ]
            return tuple(names)
    return ()


def _returned_keys(function: ast.FunctionDef) -> tuple[str, ...]:
    """The keys of the dictionary that a function returns; () where it returns anything else anywhere."""
    keys: list[str] = []
    for node in _own_nodes(function):
        if not isinstance(node, ast.Return):
            continue
        if not isinstance(node.value, ast.Dict):
            return ()
        for key in node.value.keys:
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return ()
            keys.append(key.value)
    return tuple(dict.fromkeys(keys))


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Everything in a function but the functions inside it."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))


def _bases(module: str, name: str, context_dir: Path) -> Iterator[ast.ClassDef | str]:
    """A class and its bases, nearest first; a class of this library by its name, where the walk ends."""
    return (found for found, _ in _bases_and_files(module, name, context_dir))


def _bases_and_files(
    module: str, name: str, context_dir: Path
) -> Iterator[tuple[ast.ClassDef | str, Path | None]]:
    """As :func:`_bases`, each class with the file that it stands in."""
    todo = [(module, name)]
    for _ in range(MAX_BASES):
        if not todo:
            return
        module, name = todo.pop(0)
        if module.split(".")[0] == LIBRARY:
            if name == "ReconciledTrial" and todo:  # it says nothing; a sister may
                continue
            yield name, None
            return
        if module.split(".")[0] == "determined" and name == BY_HAND:
            yield name, None
            return
        source = source_of(module, context_dir)
        tree = _tree(source)
        if source is None or tree is None:
            return
        package = module if source.name == "__init__.py" else module.rpartition(".")[0]
        imported = _imports(tree, package)
        own = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
        if own is not None:
            yield own, source
            todo[:0] = [_origin_of(base, module, imported) for base in own.bases]
        elif name in imported:
            todo.insert(0, imported[name])
        else:
            return


def _origin_of(base: ast.expr, module: str, imported: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Module and name of a base class as it is written."""
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):
        package, inner = imported.get(base.value.id, (base.value.id, ""))
        return (f"{package}.{inner}" if inner else package), base.attr
    name = _last(base)
    return imported.get(name, (module, name))


def _imports(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    """Name in a module of a package -> (module, name there), the latter "" where a module itself is imported."""
    found: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                steps = package.split(".")
                module = ".".join([*steps[: len(steps) + 1 - node.level], *([module] if module else [])])
            found.update({alias.asname or alias.name: (module, alias.name) for alias in node.names})
        elif isinstance(node, ast.Import):
            found.update({alias.asname or alias.name.split(".")[0]: (alias.name, "") for alias in node.names})
    return found


def _tree(source: Path | None) -> ast.Module | None:
    if source is None:
        return None
    try:
        return parsed(source.read_bytes())
    except (OSError, SyntaxError, ValueError):  # told where the entrypoint is checked
        return None
