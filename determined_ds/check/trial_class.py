"""The trial's class, read from its source without importing it: what it can run as, which metrics it reports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from determined_ds.config.document import Document, nearest
from determined_ds.config.trial_file import parsed, source_of
from determined_ds.errors import Problem

LIBRARY = "determined_ds"
DECLARED = "validation_metrics"
PREFIX = "validation_"  # of every name that DataParallelTrial.evaluate makes
MAX_BASES = 50
# What a trial reports that is measured (runtime/measured_loop.py).
MEASURED = ("samples_per_second", "step_seconds", "peak_memory_bytes", "loss", "tokens_per_second", "batches")


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
        mend=f"write {guess}" if guess else f"use one of {names}, or report {metric}",
        code="metric",
    )


def has_stages(trial: str, context_dir: Path) -> bool | None:
    """Whether ``MODULE:CLASS`` can be cut into pipeline stages; None where its source does not tell."""
    module, _, name = trial.partition(":")
    library = next((found for found in _bases(module, name, context_dir) if isinstance(found, str)), None)
    return {"PipelineTrial": True, "DataParallelTrial": False, "SeveralEnginesTrial": False}.get(
        library or ""
    )


def stages_problem(hyperparameters: Document, trial: str) -> Problem | None:
    """The problem of a pipeline whose trial has no stages; None where no pipeline is asked for."""
    path = ("pipe_parallel_size",)
    stages = hyperparameters.get(path)
    if not isinstance(stages, int) or stages <= 1:
        return None
    return Problem(
        key=hyperparameters.key(path),
        value=stages,
        origin=hyperparameters.origin(path),
        message=f"{trial.partition(':')[2]} has no stages: it is no PipelineTrial",
        mend="set pipe_parallel_size to 1, or name a PipelineTrial in the entrypoint",
        code="trial-kind",
    )


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
    todo = [(module, name)]
    for _ in range(MAX_BASES):
        if not todo:
            return
        module, name = todo.pop(0)
        if module.split(".")[0] == LIBRARY:
            if name == "ReconciledTrial" and todo:  # it says nothing; a sister may
                continue
            yield name
            return
        source = source_of(module, context_dir)
        tree = _tree(source)
        if source is None or tree is None:
            return
        package = module if source.name == "__init__.py" else module.rpartition(".")[0]
        imported = _imports(tree, package)
        own = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
        if own is not None:
            yield own
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
