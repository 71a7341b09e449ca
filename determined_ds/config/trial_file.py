"""Whether the entrypoint's trial is there, judged from its file alone: a misspelt name starts no ranks."""

from __future__ import annotations

import ast
import functools
import warnings
from importlib.machinery import PathFinder
from pathlib import Path

from determined_ds.config.document import Document, nearest
from determined_ds.errors import EntrypointError, Problem


def check_trial_file(trial: str, context_dir: Path, document: Document) -> None:
    """Check, without importing it, that the context directory has the entrypoint's module and class.

    A module that is not in the context directory may be installed; what is in it is left to the ranks.

    Raises:
        EntrypointError: there is no such module, it is not Python, or it cannot have such a class.
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
        mend = f"mend {where}"
        raise _entrypoint(document, trial, f"{where} is not Python: {reason}", mend) from None
    names = _names_in(tree)
    if name not in names and not names & {"*", "__getattr__"}:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        guess = nearest(name, classes)
        mend = f"did you mean {guess}?" if guess else f"it has: {', '.join(classes) or 'no class'}"
        raise _entrypoint(document, trial, f"module {module} has no {name}", mend)


def source_of(module: str, context_dir: Path) -> Path | None:
    """The file of a module of the context directory; None where there is none."""
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
            document, trial, f"{module} is no name of a module", "write e.g. my_model.trial:MyTrial"
        )
    inside = (context_dir / first).is_dir() or (context_dir / f"{first}.py").is_file()
    if not inside and PathFinder.find_spec(first) is not None:
        return
    files = sorted(file for form in ("*.py", "*/trial.py", "*/*/trial.py") for file in context_dir.glob(form))
    there = [".".join(file.relative_to(context_dir).with_suffix("").parts) for file in files]
    guess = nearest(module, there)
    mend = f"there are: {', '.join(there[:12])}" if there else f"is {context_dir} the right CONTEXT_DIR?"
    mend = f"did you mean {guess}?" if guess else mend
    raise _entrypoint(document, trial, f"the context directory has no module {module}", mend)


def _entrypoint(document: Document, trial: str, message: str, mend: str) -> EntrypointError:
    origin = document.origin(("entrypoint",))
    return EntrypointError(
        Problem(key="entrypoint", value=trial, origin=origin, message=message, mend=mend, code="entrypoint")
    )
