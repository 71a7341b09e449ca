"""Whether the entrypoint's trial exists, from its file alone: a misspelt name is found before ranks start."""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from determined_ds.config.aliases import IMPORTS
from determined_ds.documents.document import Document, nearest
from determined_ds.errors import EntrypointError, Origin, Problem


def check_trial_file(trial: str, context_dir: Path, document: Document) -> None:
    """Check, without importing it, that the context directory has the entrypoint's module and class.

    A module that is not in the context directory may be installed; what is in it is left to the ranks.

    Raises:
        EntrypointError: there is no such module, it is not Python, it imports a name of Determined's from where it
            does not exist, or it cannot have such a class.
    """
    module, _, name = trial.partition(":")
    source = source_of(module, context_dir)
    if source is None:
        _refuse_missing_module(module, trial, context_dir, document)
        return
    try:
        tree = parsed(source.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{source.relative_to(context_dir)}:{line}" if line else str(source.relative_to(context_dir))
        reason = getattr(error, "msg", None) or str(error)
        fix = f"fix {where}"
        raise _entrypoint(document, trial, f"{where} is not Python: {reason}", fix) from None
    wrong = wrong_imports(tree, source)
    if wrong:
        raise EntrypointError(wrong)
    names = _names_in(tree)
    if name not in names and not names & {"*", "__getattr__"}:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        guess = nearest(name, classes)
        fix = f"did you mean {guess}?" if guess else f"it has: {', '.join(classes) or 'no class'}"
        raise _entrypoint(document, trial, f"module {module} has no {name}", fix)


def source_of(module: str, context_dir: Path) -> Path | None:
    """The file of a module of the context directory; None where there is none."""
    if not module:  # of an entrypoint without a trial
        return None
    stem = context_dir.joinpath(*module.split("."))
    for file in (stem / "__init__.py", stem.with_name(stem.name + ".py")):
        if file.is_file():
            return file
    return None


@functools.lru_cache(maxsize=64)
def parsed(content: bytes) -> ast.Module:
    """The syntax tree of a module's source, there to be read; several questions are asked of one file.

    Raises:
        SyntaxError, ValueError: it is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler come again where the module is run
        return ast.parse(content)


def imported_names(tree: ast.Module, package: str = "") -> dict[str, str]:
    """Name in a module -> dotted name of what it imports by it.

    Args:
        tree: The module.
        package: That it is in; without one, what it imports relatively is left out.
    """
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (package or not node.level):
            steps = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join([*steps, *([node.module] if node.module else [])])
            found.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
    return found


def dotted_name(node: ast.expr, imported: dict[str, str]) -> str:
    """Dotted name of what an expression like ``optim.SGD`` names; "" for any other expression.

    Args:
        node: The expression.
        imported: Of its module, see :func:`imported_names`.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([imported.get(node.id, node.id), *parts])


def wrong_imports(tree: ast.Module, source: Path) -> list[Problem]:
    """The imports of names of Determined's from where Determined does not have them.

    Args:
        tree: Of the module.
        source: Its file.
    """
    return [_import_problem(node, name, fix, source) for node, name, fix in _wrong_imports(tree)]


def _wrong_imports(tree: ast.Module) -> Iterator[tuple[ast.AST, tuple[str, str], str]]:
    """Names of Determined's that are imported, or subclassed, where Determined does not have them."""
    imported = imported_names(tree)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                said = (str(node.module), alias.name)
                if said in IMPORTS:
                    yield node, said, IMPORTS[said]
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                module, _, name = dotted_name(base, imported).rpartition(".")
                if isinstance(base, ast.Attribute) and (module, name) in IMPORTS:
                    yield base, (module, name), IMPORTS[module, name]


def _import_problem(node: ast.AST, said: tuple[str, str], fix: str, source: Path) -> Problem:
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
    return Problem(
        key="",
        origin=Origin(f"{source}:{line}", file=str(source), line=line, column=column),
        message=f"{said[0]} has no {said[1]}",
        fix=f"write {fix}" if fix.startswith("from ") else fix,
        code="import",
    )


def _names_in(tree: ast.Module) -> set[str]:
    """Every name that the module could have: better too many than to refuse a good one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _refuse_missing_module(module: str, trial: str, context_dir: Path, document: Document) -> None:
    """Refuse a module that is neither in the context directory nor installed."""
    first = module.split(".")[0]
    if not all(part.isidentifier() for part in module.split(".")):
        raise _entrypoint(
            document, trial, f"{module} is not a valid module name", "write e.g. my_model.trial:MyTrial"
        )
    inside = (context_dir / first).is_dir() or (context_dir / f"{first}.py").is_file()
    if not inside and PathFinder.find_spec(first) is not None:
        return
    files = sorted(file for form in ("*.py", "*/trial.py", "*/*/trial.py") for file in context_dir.glob(form))
    there = [".".join(file.relative_to(context_dir).with_suffix("").parts) for file in files]
    guess = nearest(module, there)
    fix = f"there are: {', '.join(there[:12])}" if there else f"is {context_dir} the right CONTEXT_DIR?"
    fix = f"did you mean {guess}?" if guess else fix
    raise _entrypoint(document, trial, f"the context directory has no module {module}", fix)


def _entrypoint(document: Document, trial: str, message: str, fix: str) -> EntrypointError:
    return EntrypointError(document.problem(("entrypoint",), message, fix, "entrypoint", value=trial))
