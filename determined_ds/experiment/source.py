"""An author's source, read without importing it: the only reader of one in this package.

A file is a :class:`Source`; :func:`sources_of` adds the modules that it imports, :func:`read_trial` the classes that a
trial extends. What is written in an unusual way is unknown, so an error that stands on an answer is never a guess.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import itertools
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from determined_ds.errors import Origin, Problem
from determined_ds.experiment.entrypoint import Entrypoint

LIBRARY = "determined_ds"
THEIRS = "determined.pytorch.deepspeed"
BY_HAND = "DeepSpeedTrial"  # Determined's own class, which the library re-exports
UNKNOWN = ""  # the name of a class that no source shows
OWN_DRIVER = "determined-own"
# What of Determined's module makes a context and a loop, which run on its own clusters alone.
DRIVERS = (f"{THEIRS}.init", f"{THEIRS}.Trainer")
# Trial of the library -> those that it extends.
FORMS = ("DataParallelTrial", "PipelineTrial", "SeveralEnginesTrial")
TRIALS = {BY_HAND: (), "ReconciledTrial": (BY_HAND,), **dict.fromkeys(FORMS, ("ReconciledTrial", BY_HAND))}
NEUTRAL = ("abc.ABC", "typing.Generic")  # bases that add nothing
UNSEEN = ast.AST()  # stands for what no source shows
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BY_OTHER_MEANS = re.compile(r"\b(import_module|__import__|exec|runpy|sys\.path)\b")


# ------------------------------------------------------------------------------------------- one file


class SourceError(Exception):
    """Why a file cannot be read as Python; the line is 0 where that is unknown."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.line = line


@functools.lru_cache(maxsize=64)
def _parsed(content: bytes) -> tuple[ast.Module, list[ast.AST]]:
    """The syntax tree of a module, and every node of it; several questions are asked of one file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler come again where the module is run
        tree = ast.parse(content)
    return tree, list(ast.walk(tree))


class Source:
    """A file of Python: what it imports, binds and calls; for relative imports it needs the folder with the code.

    Raises:
        SourceError: it cannot be read, or is not Python.
    """

    def __init__(self, file: Path, context_dir: Path | None = None) -> None:
        self.file = file
        inside = context_dir is not None and file.is_relative_to(context_dir)
        self.package = file.parent.relative_to(context_dir or "").parts if inside else ()
        try:
            content = file.read_bytes()
            self.tree, self.nodes = _parsed(content)
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}") from None
        except (SyntaxError, ValueError, RecursionError) as error:
            reason = f"is not Python: {getattr(error, 'msg', None) or error}"
            raise SourceError(reason, getattr(error, "lineno", None) or 0) from None
        self.text = content.decode(errors="replace")

    @functools.cached_property
    def imports(self) -> list[tuple[ast.AST, str, str]]:
        """Each import, a name that it binds, and the dotted name of what that is; ``*`` with the module."""
        found: list[tuple[ast.AST, str, str]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node, alias.asname or alias.name, alias.name) for alias in node.names]
                packages = [alias.name.split(".")[0] for alias in node.names if alias.asname is None]
                found += [(node, name, name) for name in packages]
            elif isinstance(node, ast.ImportFrom) and node.level <= len(self.package):
                steps = self.package[: len(self.package) + 1 - node.level] if node.level else ()
                module = ".".join([*steps, *filter(None, [node.module])])
                for alias in node.names:
                    name = module if alias.name == "*" else f"{module}.{alias.name}"
                    found.append((node, alias.asname or alias.name, name))
        return found

    @functools.cached_property
    def bound(self) -> dict[str, set[ast.AST | str]]:
        """Name -> all that binds it anywhere in the file: the node, or the dotted name of what is imported."""
        found: dict[str, set[ast.AST | str]] = defaultdict(set)
        for _, name, target in self.imports:
            found[name].add(target)
        for node in self.nodes:
            if name := _bound_by(node):
                found[name].add(node)
        return found

    def only(self, name: str) -> ast.AST | str:
        """The one thing that binds a name in the file, as in :attr:`bound`; :data:`UNSEEN` where there are others."""
        found = self.bound.get(name, ())
        return next(iter(found)) if len(found) == 1 else UNSEEN

    @functools.cached_property
    def modules(self) -> set[str]:
        """Dotted names of all that it imports anywhere, each package that these are in included."""
        names = {name for _, _, name in self.imports}
        return {each for name in names for each in itertools.accumulate(name.split("."), "{}.{}".format)}

    def name_of(self, node: ast.AST) -> str:
        """Dotted name of what an expression like ``optim.SGD`` names; "" for any other expression."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        target = self.only(node.id)
        return ".".join([target if isinstance(target, str) else node.id, *parts])

    @functools.cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """Each call with the dotted name of what is called, of ``f().cuda`` only ``cuda``."""
        nodes = [node for node in self.nodes if isinstance(node, ast.Call)]
        return [(node, self.name_of(node.func) or getattr(node.func, "attr", "")) for node in nodes]

    def problem(self, node: ast.AST, message: str, fix: str, code: str) -> Problem:
        """A problem of a line."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        origin = Origin(f"{self.file}:{line}", file=str(self.file), line=line, column=column)
        return Problem(key="", origin=origin, message=message, fix=fix, code=code)

    def own_drivers(self) -> Iterator[Problem]:
        """Calls of Determined's own context or loop for DeepSpeed; those under a condition are left to the run."""
        lines = self.text.splitlines()
        blocks = [node for node in self.nodes if isinstance(node, (ast.If, ast.Try))]
        guards = [node for node in blocks if "__name__" not in lines[node.lineno - 1]]
        for call, name in self.calls:
            if name in DRIVERS and not within(call, guards):
                message = f"{name} trains only on GPUs on a Determined cluster"
                fix = "write from determined_ds import deepspeed as det_ds, which has the same names and runs here too"
                yield self.problem(call, message, fix, OWN_DRIVER)


def _bound_by(node: ast.AST) -> str:
    """The name that a node binds, other than by an import; "" for none."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs)):
        return node.name or ""
    return node.id if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) else ""


def within(call: ast.Call, blocks: Iterable[ast.stmt]) -> bool:
    """Whether a call is in one of some blocks."""
    return any(each.lineno <= call.lineno <= (each.end_lineno or 0) for each in blocks)


# ------------------------------------------------------------------------------------------- modules


def source_of(module: str, context_dir: Path) -> Path | None:
    """The file of a module of the context directory; None where there is none."""
    stem = context_dir.joinpath(*module.split("."))
    files = [stem / "__init__.py", stem.with_name(stem.name + ".py")] if module else []
    return next((file for file in files if file.is_file()), None)


def find_code(entrypoint: Entrypoint, context_dir: Path) -> Path | None:
    """The file of a script, or of a trial's module, in the context directory; None where it is not there."""
    if not entrypoint.is_script:
        return source_of(entrypoint.trial.partition(":")[0], context_dir)
    name = entrypoint.name
    if entrypoint.is_module:
        return source_of(f"{name}.__main__", context_dir) or source_of(name, context_dir)
    return context_dir / name if (context_dir / name).is_file() else None


def installed(package: str, *folders: Path) -> str | None:
    """Where a package is that can be imported, and is in none of some folders; nothing of it is run."""
    if any((folder / package).is_dir() or (folder / f"{package}.py").is_file() for folder in folders):
        return None
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # it is loaded already, in an unusual way, such as __main__
        return "unknown"
    return f"{spec.origin} {spec.submodule_search_locations}" if spec else None


def sources_of(file: Path, context_dir: Path) -> dict[Path, Source]:
    """A script, or a trial's module, and the modules that it imports from beside it or the context directory.

    Of these, what is not Python is left to the run, and this library is left out. Where the file itself is not Python,
    it raises a SourceError.
    """
    found = {file: Source(file, context_dir)}
    todo = [file]
    for each in todo:
        for module in sorted(found[each].modules):
            inner = source_of(module, file.parent) or source_of(module, context_dir)
            if inner and inner not in found and module.split(".")[0] != LIBRARY:
                with contextlib.suppress(SourceError):
                    found[inner] = Source(inner, context_dir)
                    todo.append(inner)
    return found


def may_use_library(script: Path, context_dir: Path) -> bool:
    """Whether a script, or a module of the context directory that it imports, may import this library."""
    sources = sources_of(script, context_dir).values()
    packages = {name for source in sources for name in source.modules if "." not in name}
    if LIBRARY in packages or any(BY_OTHER_MEANS.search(source.text) for source in sources):
        return True
    # One that is installed in place is not read.
    places = [installed(name, script.parent, context_dir) for name in packages - sys.stdlib_module_names]
    return any(place and "-packages" not in place for place in places)


# ------------------------------------------------------------------------------------------- a trial's class


@dataclass(frozen=True, kw_only=True)
class TrialClass:
    """``MODULE:CLASS`` and all that it extends, as far as sources of the context directory show it.

    Args:
        name: The class.
        extends: Classes of this library that it extends, the nearest first; :data:`UNKNOWN` for any other class.
        members: What its own classes bind, those that Python looks names up in before the library's.
        sources: Of its own classes, its own first.
        context_dir: The folder with the code.
    """

    name: str
    extends: tuple[str, ...]
    members: Mapping[str, ast.AST]
    sources: tuple[Source, ...]
    context_dir: Path

    @property
    def has_stages(self) -> bool | None:
        """Whether it can be cut into pipeline stages; None where its source does not show it."""
        if "PipelineTrial" in self.extends:
            return True
        is_other = self.extends[0] in ("DataParallelTrial", "SeveralEnginesTrial")
        return False if is_other and UNKNOWN not in self.extends else None

    def member(self, name: str) -> ast.AST | None:
        """A method, or the value of an attribute: :data:`UNSEEN` where no source shows it, None if the library's."""
        for source in self.sources:
            stored = (node for node in source.nodes if isinstance(getattr(node, "ctx", None), ast.Store))
            if "setattr" in source.text or any(getattr(node, "attr", "") == name for node in stored):
                return UNSEEN  # it may be set on the class or on the trial
        return self.members.get(name, UNSEEN if UNKNOWN in self.extends else None)


def read_trial(trial: str, context_dir: Path) -> TrialClass:
    """Read a trial's class and all that it extends.

    Args:
        trial: ``MODULE:CLASS``.
        context_dir: The folder with the code.
    """
    # The farthest base first: of a class that several extend, the last mention counts.
    order = dict(reversed(_family(trial.replace(":", "."), context_dir)))
    members: dict[str, ast.AST] = {}
    for kind in order:  # behind a class of the library Python finds what that binds
        members = {} if isinstance(kind, str) else members | _members(kind)
    return TrialClass(
        name=trial.partition(":")[2],
        extends=tuple(kind for kind in reversed(order) if isinstance(kind, str)) or (UNKNOWN,),
        members=members,
        sources=tuple(filter(None, reversed(order.values()))),
        context_dir=context_dir,
    )


def _family(dotted: str, context_dir: Path, depth: int = 0) -> list[tuple[ast.ClassDef | str, Source | None]]:
    """A class by its dotted name, and each base with its own bases; each with its file, or None of a name."""
    module, _, name = dotted.rpartition(".")
    if dotted.startswith(f"{LIBRARY}.") or (dotted.startswith("determined.") and name == BY_HAND):
        return [(each, None) for each in ((name, *TRIALS[name]) if name in TRIALS else [UNKNOWN])]
    if name == "object" or dotted in NEUTRAL:
        return []
    file = source_of(module, context_dir)
    node: ast.AST | str = UNSEEN
    if file and depth < 20:
        with contextlib.suppress(SourceError):
            source = Source(file, context_dir)
            node = UNSEEN if "*" in source.bound else source.only(name)
    if isinstance(node, str):
        return _family(node, context_dir, depth + 1)
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
        return [(UNKNOWN, None)]
    family: list[tuple[ast.ClassDef | str, Source | None]] = [(node, source)]
    for base in node.bases:
        named = source.name_of(base.value if isinstance(base, ast.Subscript) else base)  # Generic[...]
        family += _family(named if "." in named else f"{module}.{named}", context_dir, depth + 1)
    return family


def _members(kind: ast.ClassDef) -> dict[str, ast.AST]:
    """What the body of a class binds: a method, or the value of an attribute; UNSEEN for anything else."""
    found: dict[str, ast.AST] = {}
    for statement in kind.body:
        value: ast.AST | None = UNSEEN
        names = [name for node in ast.walk(statement) if (name := _bound_by(node))]
        if isinstance(statement, FUNCTIONS):
            names, value = [statement.name], UNSEEN if statement.decorator_list else statement
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and len(names) == 1:
            value = statement.value  # None of a type alone
        found |= {name: UNSEEN if name in found else value for name in names if value}
    return found
