"""Whether what an experiment runs can run here, from its source and the modules beside it: nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path

from determined_ds.documents.document import Document, nearest
from determined_ds.errors import EntrypointError, Origin, Problem
from determined_ds.experiment.entrypoint import ScriptEntrypoint
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.trial_file import (
    check_trial_file,
    dotted_name,
    parsed,
    source_of,
    wrong_imports,
)

LIBRARY = "determined_ds"
THEIRS = "determined.pytorch.deepspeed"
# Libraries whose loops name the metrics.
MAKE_METRICS = ("transformers", "trl", "lightning", "pytorch_lightning")
# What of Determined's module makes a context and a loop, which run on its own clusters alone.
DRIVERS = ("init", "Trainer")
OWN_DRIVER = "determined-own"
INSTEAD = "from determined_ds import deepspeed as det_ds"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script and the modules of the context directory that it imports.

    Args:
        file: Of the script.
        context_dir: The folder with the code.
    """

    file: Path
    context_dir: Path

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        """The syntax tree of each; modules that are not Python are left to the run.

        Raises:
            SyntaxError, ValueError: the script itself is not Python.
        """
        found = {self.file: parsed(self.file.read_bytes())}
        todo = [self.file]
        while todo:
            file = todo.pop()
            for module in _modules(found[file], self._package(file)):
                source = next(filter(None, (source_of(module, folder) for folder in self._path)), None)
                if source is None or source in found:
                    continue
                try:
                    found[source] = parsed(source.read_bytes())
                except (OSError, SyntaxError, ValueError):
                    continue
                todo.append(source)
        return found

    @property
    def _path(self) -> tuple[Path, ...]:
        """Where Python finds its modules: beside the script first."""
        return tuple(dict.fromkeys((self.file.parent, self.context_dir)))

    def _package(self, file: Path) -> str:
        try:
            parts = file.relative_to(self.context_dir).parent.parts
        except ValueError:
            return ""
        return ".".join(parts)

    @cached_property
    def uses_library(self) -> bool:
        """Whether it, or a module that it imports, imports this library."""
        return any(
            module.split(".")[0] == LIBRARY for tree in self.trees.values() for module in _modules(tree, "")
        )

    def names_metric(self, metric: str) -> bool:
        """Whether a name of a metric may be one that it reports: it is written out, or another library makes names."""
        if any(
            module.split(".")[0] in MAKE_METRICS
            for tree in self.trees.values()
            for module in _modules(tree, "")
        ):
            return True
        names = {metric, metric.removeprefix("validation_"), metric.removeprefix("val_")}
        return any(
            (isinstance(node, ast.Constant) and node.value in names) or getattr(node, "arg", None) in names
            for tree in self.trees.values()
            for node in ast.walk(tree)
        )

    def problems(self) -> list[Problem]:
        """Wrong imports, and uses of Determined's own context or loop for DeepSpeed, which only its clusters run."""
        found = []
        for file, tree in self.trees.items():
            found += wrong_imports(tree, file)
            for line, column, name in sorted(_drivers(tree)):
                found.append(_own_driver(file, line, column, name))
        return found

    def missing_packages(self) -> list[Problem]:
        """Imports of what is neither in the context directory nor installed; those that are tried are left out."""
        if any("sys.path" in ast.unparse(tree) for tree in self.trees.values()):
            return []
        found: dict[str, Problem] = {}
        for file, tree in self.trees.items():
            for node in tree.body:
                for problem in self._missing_in(node, file):
                    found.setdefault(problem.message, problem)
        return [*found.values()]

    def _missing_in(self, node: ast.stmt, file: Path) -> Iterator[Problem]:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        for first in dict.fromkeys(name.split(".")[0] for name in names):
            inside = any(
                (folder / first).is_dir() or (folder / f"{first}.py").is_file() for folder in self._path
            )
            if (
                not inside
                and first not in sys.stdlib_module_names
                and importlib.util.find_spec(first) is None
            ):
                yield Problem(
                    key="",
                    origin=Origin(f"{file}:{node.lineno}", file=str(file), line=node.lineno, column=1),
                    message=f"imports {first}, which is neither in the context directory nor installed here",
                    fix=f"pip install the package that has {first}",
                    code="missing-package",
                )


def find_script(script: ScriptEntrypoint, context_dir: Path) -> Path | None:
    """The file of a script in the context directory; None where it is not there."""
    if not script.is_module:
        file = context_dir / script.name
        return file if file.is_file() else None
    package = context_dir.joinpath(*script.name.split("."), "__main__.py")
    return package if package.is_file() else source_of(script.name, context_dir)


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
        _refuse_missing(script, context_dir, document)
        return None
    found = Script(file=file, context_dir=context_dir)
    try:
        problems = found.problems()
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{file}:{line}" if line else str(file)
        message = f"{where} is not Python: {getattr(error, 'msg', None) or error}"
        raise _entrypoint(script, document, message, f"fix {where}") from None
    if problems:
        raise EntrypointError(problems)
    return found


def check_entrypoint(
    experiment: Experiment,
    context_dir: Path,
    *,
    needs_library: Callable[[ScriptEntrypoint], Problem] | None = None,
) -> None:
    """Check, without importing it, what an experiment runs.

    Args:
        experiment: It.
        context_dir: The folder with the code.
        needs_library: The problem of a script that trains without this library, where that is one: :func:`no_test`,
            :func:`not_measured`.

    Raises:
        EntrypointError: it is not there, or cannot run here.
    """
    script = experiment.script
    if script is None:
        check_trial_file(experiment.trial, context_dir, experiment.document)
        return
    found = check_script(script, context_dir, experiment.document)
    missing = found.missing_packages() if found is not None and not _states_path(experiment) else []
    if missing:
        raise EntrypointError(missing)
    if needs_library is not None and found is not None and not found.uses_library:
        raise EntrypointError(needs_library(script))


def _states_path(experiment: Experiment) -> bool:
    """Whether environment variables of the experiment say where Python finds modules."""
    return "PYTHONPATH" in str((experiment.config.get("environment") or {}).get("environment_variables"))


def no_test(script: ScriptEntrypoint) -> Problem:
    """The problem of ``--test`` for a script whose loop is its own."""
    return Problem(
        key="--test",
        message=f"{script.name} trains by a loop of its own, which cannot be shortened to one batch",
        fix="train by determined_ds.deepspeed.Trainer or determined_ds.session in it; or leave --test out, and have "
        "the script train less by its arguments",
        code="test",
    )


def not_measured(script: ScriptEntrypoint) -> Problem:
    """The problem of ``--measure`` for a script whose steps nothing of this library sees."""
    return Problem(
        key="--measure",
        message=f"{script.name} trains without determined_ds.session() or DetCallback, so no step is measured",
        fix="train by determined_ds.session(), determined_ds.deepspeed.Trainer, or transformers' Trainer with "
        "determined_ds.transformers.DetCallback in it",
        code="measure",
    )


def _refuse_missing(script: ScriptEntrypoint, context_dir: Path, document: Document) -> None:
    if script.is_module:
        first = script.name.split(".")[0]
        inside = (context_dir / first).is_dir() or (context_dir / f"{first}.py").is_file()
        if not inside and PathFinder.find_spec(first) is not None:
            return
    files = sorted(
        str(file.relative_to(context_dir)) for form in ("*.py", "*/*.py") for file in context_dir.glob(form)
    )
    there = [file.removesuffix(".py").replace("/", ".") for file in files] if script.is_module else files
    guess = nearest(script.name, there)
    fix = f"there are: {', '.join(there[:12])}" if there else f"is {context_dir} the right CONTEXT_DIR?"
    what = "module" if script.is_module else "file"
    message = f"the context directory has no {what} {script.name}"
    raise _entrypoint(script, document, message, f"did you mean {guess}?" if guess else fix)


def _entrypoint(script: ScriptEntrypoint, document: Document, message: str, fix: str) -> EntrypointError:
    return EntrypointError(document.problem(("entrypoint",), message, fix, "entrypoint", value=str(script)))


def _modules(tree: ast.Module, package: str) -> Iterator[str]:
    """Dotted names of all that a module imports, anywhere in it, and of what may be modules among the names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = package.split(".") if package else []
                module = ".".join([*parts[: len(parts) + 1 - node.level], *([module] if module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if alias.name != "*")


def _drivers(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    """Places where a module uses Determined's ``init`` or ``Trainer`` for DeepSpeed: line, column, name."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names[alias.asname or alias.name] = full
                if full in {f"{THEIRS}.{name}" for name in DRIVERS}:
                    yield node.lineno, node.col_offset + 1, full
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DRIVERS:
            full = dotted_name(node, names)
            if full in {f"{THEIRS}.{name}" for name in DRIVERS}:
                yield node.lineno, node.col_offset + 1, full


def _own_driver(file: Path, line: int, column: int, name: str) -> Problem:
    return Problem(
        key="",
        origin=Origin(f"{file}:{line}", file=str(file), line=line, column=column),
        message=f"{name} trains only on GPUs on a Determined cluster",
        fix=f"write {INSTEAD}, which has the same names and runs here too",
        code=OWN_DRIVER,
    )
