"""An author's source, read without importing it: the only reader of one in this package.

A file is a :class:`Source`, a script with the modules that it imports a :class:`Script`, a trial's class with all that
it extends a :class:`TrialClass`. What a source does not show is None or says so: conditional definitions, decorators,
computed names, modules from elsewhere. So an error that stands on these answers is never a guess.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from determined_ds.errors import Origin, Problem
from determined_ds.experiment.entrypoint import Entrypoint, TrialEntrypoint

LIBRARY = "determined_ds"
THEIRS = "determined.pytorch.deepspeed"
BY_HAND = "DeepSpeedTrial"  # Determined's own class, which the library re-exports
UNKNOWN = ""  # the name of a class that no source shows
# Class of the library -> those that it extends, as Python looks names up.
OWN = ("ReconciledTrial", BY_HAND)
TRIALS = {
    BY_HAND: (),
    "ReconciledTrial": (BY_HAND,),
    "DataParallelTrial": OWN,
    "PipelineTrial": OWN,
    "SeveralEnginesTrial": OWN,
}
# Decorators that leave what a function or class is used for.
HARMLESS = (
    *("torch.no_grad", "torch.inference_mode", "torch.enable_grad", "staticmethod", "classmethod"),
    *("typing.override", "typing.final", "typing_extensions.override", "dataclasses.dataclass"),
    *("abc.abstractmethod", "functools.total_ordering"),
)
# What of Determined's module makes a context and a loop, which run on its own clusters alone.
DRIVERS = ("init", "Trainer")
OWN_DRIVER = "determined-own"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.Lambda, ast.ClassDef)
Bindings = dict[str, list[tuple[ast.AST, str]]]


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
        try:
            tree = ast.parse(content)
        except (RecursionError, MemoryError):  # Python itself may run what is nested so deeply
            tree = ast.parse("from elsewhere import *")
    return tree, list(ast.walk(tree))


class Source:
    """A file of Python: what it imports, binds and calls.

    Args:
        file: It.
        context_dir: The folder with the code, for relative imports; None leaves those out.

    Raises:
        SourceError: it cannot be read, or is not Python.
    """

    def __init__(self, file: Path, context_dir: Path | None = None) -> None:
        self.file = file
        inside = context_dir is not None and file.is_relative_to(context_dir)
        self.package = file.relative_to(context_dir).parent.parts if inside and context_dir else ()
        try:
            self.tree, self.nodes = _parsed(file.read_bytes())
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}") from None
        except (SyntaxError, ValueError) as error:
            reason = f"is not Python: {getattr(error, 'msg', None) or error}"
            raise SourceError(reason, getattr(error, "lineno", None) or 0) from None

    def imported(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """The names that an import binds, each with the dotted name of what it is; ``*`` with the module."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                yield alias.asname or first, alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.level <= len(self.package):
            steps = self.package[: len(self.package) + 1 - node.level] if node.level else ()
            module = ".".join([*steps, *filter(None, [node.module])])
            for alias in node.names:
                yield alias.asname or alias.name, module if alias.name == "*" else f"{module}.{alias.name}"

    def bindings(self, body: Iterable[ast.AST]) -> Bindings:
        """Name -> all that binds it in a body of statements, each with the dotted name of what is imported, or "".

        What functions and classes in it bind is theirs.
        """
        found: Bindings = defaultdict(list)
        todo = list(body)
        while todo:
            node = todo.pop()
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, target in self.imported(node):
                    found[name].append((node, target))
            elif isinstance(node, SCOPES):
                found[getattr(node, "name", "")].append((node, ""))
            else:
                stores = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
                bound = getattr(node, "id" if stores else "name", None) or getattr(node, "rest", None)
                if isinstance(bound, str):
                    found[bound].append((node, ""))
                todo.extend(ast.iter_child_nodes(node))
        return found

    @cached_property
    def bound(self) -> Bindings:
        """The bindings of its top level."""
        return self.bindings(self.tree.body)

    @property
    def classes(self) -> list[str]:
        """The names of the classes at its top level."""
        return [node.name for node in self.tree.body if isinstance(node, ast.ClassDef)]

    def may_have(self, name: str) -> bool:
        """Whether a module may have a name: better one too many than to refuse a good one."""
        made = any(called in ("globals", "locals", "vars", "exec", "setattr") for _, called in self.calls)
        is_global = any(isinstance(node, ast.Global) and name in node.names for node in self.nodes)
        return made or is_global or bool({name, "*", "__getattr__"} & self.bound.keys())

    @cached_property
    def names(self) -> dict[str, str]:
        """Name -> dotted name of what is imported by it anywhere in the file; without names of two meanings."""
        found: dict[str, set[str]] = defaultdict(set)
        for node in self.nodes:
            for name, target in self.imported(node):
                found[name].add(target)
        for name, bindings in self.bound.items():
            found[name].update(target for _, target in bindings)
        return {name: min(each) for name, each in found.items() if len(each) == 1 and "" not in each}

    @cached_property
    def modules(self) -> set[str]:
        """Dotted names of all that it imports anywhere, each package that these are in included."""
        found = set()
        for node in self.nodes:
            names = [target for _, target in self.imported(node)]
            for name in [alias.name for alias in node.names] if isinstance(node, ast.Import) else names:
                parts = name.split(".")
                found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return found

    def name_of(self, node: ast.AST) -> str:
        """Dotted name of what an expression like ``optim.SGD`` names; "" for any other expression."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        return ".".join([self.names.get(node.id, node.id), *parts]) if isinstance(node, ast.Name) else ""

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """Each call with the dotted name of what is called, in the order of the file."""
        nodes = [node for node in self.nodes if isinstance(node, ast.Call)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        return [(node, self.name_of(node.func)) for node in nodes]

    def calls_of(self, *names: str) -> list[ast.Call]:
        """The calls of functions by their dotted names."""
        return [node for node, name in self.calls if name in names]

    def method_calls(self, *names: str) -> Iterator[tuple[ast.Call, str]]:
        """The calls of methods by these names, each with what it is called on."""
        for node, _ in self.calls:
            if isinstance(node.func, ast.Attribute) and node.func.attr in names:
                yield node, text_of(node.func.value)

    def derived(self, *bases: str) -> list[ast.ClassDef]:
        """The classes that extend one of these, by dotted names or through another class of the file."""
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        known = set(bases)
        for _ in classes:
            known |= {node.name for node in classes if known & {self.name_of(base) for base in node.bases}}
        return [node for node in classes if node.name in known]

    @cached_property
    def targets(self) -> dict[ast.expr, list[str]]:
        """Value of each assignment -> what it is assigned to, in order."""
        assigned = [node for node in self.nodes if isinstance(node, ast.Assign)]
        return {
            node.value: [text_of(each) for part in node.targets for each in getattr(part, "elts", [part])]
            for node in assigned
        }

    def problem(self, node: ast.AST, message: str, fix: str, code: str) -> Problem:
        """A problem of a line."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        origin = Origin(f"{self.file}:{line}", file=str(self.file), line=line, column=column)
        return Problem(key="", origin=origin, message=message, fix=fix, code=code)


def text_of(node: ast.AST) -> str:
    """An expression as it may be written; shortened where it is nested too deeply to write out."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "..."


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    """The value of the first keyword argument by one of these names."""
    return next((each.value for each in call.keywords if each.arg in names), None)


def returned(function: ast.AST | None) -> list[ast.expr | None] | None:
    """What a function returns in all its return statements; None where it is a generator, or no function.

    A variable that is assigned once, and used nowhere else, stands for its value.
    """
    if not isinstance(function, ast.FunctionDef):
        return None
    own: list[ast.AST] = []
    todo: list[ast.AST] = list(function.body)
    while todo:
        own.append(node := todo.pop())
        todo.extend(ast.iter_child_nodes(node) if not isinstance(node, SCOPES) else ())
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own):
        return None
    uses = Counter(node.id for node in own if isinstance(node, ast.Name))
    assigned = [node for node in function.body if isinstance(node, ast.Assign)]
    values = {getattr(node.targets[0], "id", ""): node.value for node in assigned}
    found = [node.value for node in own if isinstance(node, ast.Return)]
    return [values.get(name, each) if uses[name := getattr(each, "id", "")] == 2 else each for each in found]


# ------------------------------------------------------------------------------------------- modules


def source_of(module: str, context_dir: Path) -> Path | None:
    """The file of a module of the context directory; None where there is none."""
    stem = context_dir.joinpath(*module.split("."))
    files = [stem / "__init__.py", stem.with_name(stem.name + ".py")] if module else []
    return next((file for file in files if file.is_file()), None)


def find_code(entrypoint: Entrypoint, context_dir: Path) -> Path | None:
    """The file of a script, or of a trial's module, in the context directory; None where it is not there."""
    if isinstance(entrypoint, TrialEntrypoint):
        return source_of(entrypoint.trial.partition(":")[0], context_dir)
    parts = [*entrypoint.name.split("."), "__main__.py"] if entrypoint.is_module else [entrypoint.name]
    file = context_dir.joinpath(*parts)
    if file.is_file():
        return file
    return source_of(entrypoint.name, context_dir) if entrypoint.is_module else None


def installed(package: str) -> ModuleSpec | None:
    """Where a package is that can be imported; nothing of it is run."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):  # it is loaded already, in an unusual way, such as __main__
        return ModuleSpec(package, None)


def is_inside(package: str, *folders: Path) -> bool:
    """Whether one of some folders has a package or module, compiled ones included."""
    if any((folder / package).is_dir() or (folder / f"{package}.py").is_file() for folder in folders):
        return True
    return PathFinder.find_spec(package, [str(folder) for folder in folders]) is not None


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script, or a trial's module, and the modules of the context directory that it imports.

    Args:
        file: It.
        context_dir: The folder with the code.
    """

    file: Path
    context_dir: Path

    @cached_property
    def sources(self) -> dict[Path, Source]:
        """Each of them; modules that are not Python are left to the run.

        Raises:
            SourceError: the file itself is not Python.
        """
        found = {self.file: Source(self.file, self.context_dir)}
        todo = [self.file]
        while todo:
            for module in found[todo.pop()].modules:
                file = next(filter(None, (source_of(module, folder) for folder in self.path)), None)
                if file is None or file in found or module.split(".")[0] == LIBRARY:
                    continue
                with contextlib.suppress(SourceError):
                    found[file] = Source(file, self.context_dir)
                    todo.append(file)
        return found

    @property
    def path(self) -> tuple[Path, ...]:
        """Where Python finds its modules: beside the script first."""
        return tuple(dict.fromkeys((self.file.parent, self.context_dir)))

    @cached_property
    def may_use_library(self) -> bool:
        """Whether it, or a module that it imports, may import this library; code installed in place is not read."""
        sources = [*self.sources.values()]
        modules = {name for source in sources for name in source.modules if "." not in name}
        named = {
            source.name_of(node)
            for source in sources
            for node in source.nodes
            if isinstance(node, ast.Attribute)
        }
        called = {name for source in sources for _, name in source.calls}
        by_name = called & {"importlib.import_module", "__import__", "exec"} or "sys.path" in named
        others = (name for name in modules - sys.stdlib_module_names if not is_inside(name, *self.path))
        specs = filter(None, map(installed, others))
        return (
            LIBRARY in modules
            or bool(by_name)
            or any("-packages" not in f"{spec.origin} {spec.submodule_search_locations}" for spec in specs)
        )

    def own_drivers(self) -> Iterator[Problem]:
        """Uses of Determined's own context or loop for DeepSpeed; those under a condition are left to the run."""
        for source in self.sources.values():
            todo: list[ast.AST] = [source.tree]
            for node in todo:
                named = [source.name_of(node)] if isinstance(node, ast.Attribute) else []
                for name in named or [target for _, target in source.imported(node)]:
                    if name in {f"{THEIRS}.{each}" for each in DRIVERS}:
                        message = f"{name} trains only on GPUs on a Determined cluster"
                        fix = "write from determined_ds import deepspeed as det_ds, which has the same names and "
                        yield source.problem(node, message, f"{fix}runs here too", OWN_DRIVER)
                is_conditional = isinstance(node, ast.If) and "__name__" not in text_of(node.test)
                todo.extend(() if isinstance(node, ast.Try) or is_conditional else ast.iter_child_nodes(node))


# ------------------------------------------------------------------------------------------- a trial's class


@dataclass(frozen=True, kw_only=True)
class Defined:
    """A class, or what a class binds to a name: the node, None where the source does not show it, and the file."""

    node: Any
    source: Any = field(default=None, compare=False)


UNSEEN = Defined(node=None)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialClass:
    """``MODULE:CLASS`` and all that it extends, as far as sources of the context directory show it."""

    name: str
    context_dir: Path
    extends: tuple[
        str, ...
    ]  # classes of this library, the nearest first; UNKNOWN before where it may be others
    members: Mapping[str, Defined]  # what its own classes bind
    is_open: bool  # whether its code may set any attribute
    sources: Mapping[Path, Source]  # of its own classes
    file: Path | None  # of its module; None where that is elsewhere

    @property
    def library(self) -> str:
        """The class of this library that it extends first; :data:`UNKNOWN` where its source does not show it."""
        return self.extends[0]

    @property
    def has_stages(self) -> bool | None:
        """Whether it can be cut into pipeline stages; None where its source does not show it."""
        if "PipelineTrial" in self.extends:
            return True
        return False if self.library in ("DataParallelTrial", "SeveralEnginesTrial") else None

    @property
    def computes_on_slices(self) -> bool | None:
        """Whether it takes slices of sequences; None where its source does not show it."""
        stated = self.member("sequence_parallel")
        if stated is None:
            return False if self.library not in (UNKNOWN, BY_HAND) else None
        return bool(stated.node.value) if isinstance(stated.node, ast.Constant) else None

    def member(self, name: str) -> Defined | None:
        """The nearest definition of a method, or value of an attribute; None where it is the library's, if any's."""
        if self.is_open:
            return UNSEEN
        return self.members.get(name, UNSEEN if self.library == UNKNOWN else None)

    def mentions(self, *names: str, everywhere: bool = False) -> bool:
        """Whether code of its classes uses or defines such a name; or all that its module imports, too."""
        sources = {**self.sources}
        if everywhere and self.file in sources:
            sources |= Script(file=self.file, context_dir=self.context_dir).sources
        nodes = (node for source in sources.values() for node in source.nodes)
        return any({getattr(node, "attr", None), getattr(node, "name", None)} & {*names} for node in nodes)


def read_trial(trial: str, context_dir: Path) -> TrialClass:
    """Read a trial's class and all that it extends, in one pass.

    Args:
        trial: ``MODULE:CLASS``.
        context_dir: The folder with the code.
    """
    module, _, name = trial.partition(":")
    # As Python looks names up in it, but for the order of a class that two others extend in different ways.
    order = [*reversed(dict.fromkeys(reversed(_family(f"{module}.{name}", context_dir, ()))))]
    library = next((index for index, each in enumerate(order) if isinstance(each, str)), len(order))
    if UNKNOWN in order:  # it may extend a class of the library itself
        order = [*order[:library], UNKNOWN, *(each for each in order[library:] if each != UNKNOWN)]
    own = [each for each in order if isinstance(each, Defined)]
    members: dict[str, Defined] = {}
    for kind in own:
        if kind in order[:library]:  # else it comes after the library's
            body = [node for node in kind.node.body if getattr(node, "value", node) is not None]
            for bound, bindings in kind.source.bindings(body).items():
                shown = _shown(bindings[0][0], bound, body, kind.source) if len(bindings) == 1 else None
                members.setdefault(bound, Defined(node=shown, source=kind.source))
    assigned = set[
        str
    ]()  # attributes that code of its classes, or beside them, sets; * where that may be any
    classes = {each.node.name for each in own}
    for kind in own:
        inside = {*ast.walk(kind.node)}
        for node in kind.source.nodes:
            owner, attribute = None, "*"
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                owner, attribute = node.value, node.attr
            elif isinstance(node, ast.Call) and text_of(node.func) == "setattr" and len(node.args) == 3:
                owner, attribute = node.args[0], getattr(node.args[1], "value", "*")
            whose = getattr(owner, "id", "")
            if owner and (whose in classes or (node in inside and (attribute != "*" or whose == "self"))):
                assigned.add(attribute)
    return TrialClass(
        name=name,
        context_dir=context_dir,
        extends=(*(each for each in order if isinstance(each, str)), UNKNOWN),
        members=members | dict.fromkeys(assigned, UNSEEN),
        is_open="*" in assigned,
        sources={each.source.file: each.source for each in own},
        file=source_of(module, context_dir),
    )


def _shown(node: ast.AST, name: str, body: list[ast.AST], source: Source) -> ast.AST | None:
    """What the one binding of a name in a class gives it; None where that is made of something else."""
    if isinstance(node, FUNCTIONS):
        return node if node in body and _is_plain(node, source) else None
    for each in body:
        if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.value is not None:
            target = each.target if isinstance(each, ast.AnnAssign) else each.targets[0]
            if getattr(target, "id", "") == name:
                return each.value
    return None


def _family(dotted: str, context_dir: Path, below: tuple[str, ...]) -> list[Defined | str]:
    """A class, and each base with its own bases; those of this library by name."""
    found = UNKNOWN if dotted in below else _class(dotted, context_dir)
    if isinstance(found, str):
        return [] if found == "object" else [found, *TRIALS.get(found, ())]
    source = found.source
    family: list[Defined | str] = [found]
    for base in found.node.bases:
        base = base.value if isinstance(base, ast.Subscript) else base  # Generic[...]
        named = source.name_of(base)
        root = next((node.id for node in ast.walk(base) if isinstance(node, ast.Name)), "")
        if root not in source.names and (named != "object" or named in source.bound):
            module = ".".join(source.file.relative_to(context_dir).with_suffix("").parts)
            named = UNKNOWN if "." in named else f"{module.removesuffix('.__init__')}.{named}"
        family += _family(named, context_dir, (*below, dotted))
    return family


def _class(dotted: str, context_dir: Path, depth: int = 0) -> Defined | str:
    """A class by its dotted name; the name of one of the library; ``object`` for one of Python's; or UNKNOWN."""
    module, _, name = dotted.rpartition(".")
    package = dotted.split(".")[0]
    if package == LIBRARY or (package == "determined" and name == BY_HAND):
        return name if name in TRIALS else UNKNOWN
    file = source_of(module, context_dir)
    if file is None or depth > 20:
        return "object" if dotted == "object" or package in sys.stdlib_module_names else UNKNOWN
    try:
        source = Source(file, context_dir)
    except SourceError:
        return UNKNOWN
    elsewhere = [(node, f"{each}.{name}") for node, each in source.bound.get("*", ())]
    [(node, target), *more] = source.bound.get(name) or elsewhere or [(source.tree, "")]
    if target and all(each == target for _, each in more):
        return _class(target, context_dir, depth + 1)
    is_shown = isinstance(node, ast.ClassDef) and not more and _is_plain(node, source)
    return Defined(node=node, source=source) if is_shown else UNKNOWN


def _is_plain(node: ast.AST, source: Source) -> bool:
    """Whether a class or a function is what is written: no decorator or metaclass makes another of it."""
    if any(text_of(each.value) not in ("ABCMeta", "abc.ABCMeta") for each in getattr(node, "keywords", ())):
        return False
    used = [each.func if isinstance(each, ast.Call) else each for each in getattr(node, "decorator_list", ())]
    return all(source.name_of(each) in HARMLESS for each in used)
