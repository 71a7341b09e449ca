"""The source of a script or trial, and what in it calls which function of which library. Nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from determined_ds.check.output import Finding
from determined_ds.errors import Origin, Problem
from determined_ds.experiment.trial_file import dotted_name, parsed

# Names of variables that hold what is reported, and of code that validates.
METRIC = re.compile(r"loss|acc(uracy)?\b|perplexity|ppl\b|auc\b|f1\b", re.IGNORECASE)
VALIDATES = re.compile(
    r"(^|_)(test|val|valid|validation|eval|evaluate|dev)($|_|\d|loader|set|data)", re.IGNORECASE
)


class Source:
    """A file of Python.

    Args:
        file: It.

    Raises:
        SyntaxError, ValueError: it is not Python.
        OSError: it cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.tree = parsed(file.read_bytes())

    @cached_property
    def names(self) -> dict[str, str]:
        """Name -> dotted name of what is imported by it, anywhere in the file."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
        return found

    @cached_property
    def modules(self) -> set[str]:
        """Every module that is imported, and each that it is in."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                parts = name.split(".")
                found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return found

    def name_of(self, node: ast.expr) -> str:
        """Dotted name of what an expression names; "" for any other expression."""
        return dotted_name(node, self.names)

    @cached_property
    def calls(self) -> list[tuple[ast.Call, str]]:
        """Each call with the dotted name of what is called, in the order of the file."""
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        return [(node, self.name_of(node.func)) for node in nodes]

    def calls_of(self, *names: str) -> list[ast.Call]:
        """The calls of functions by their dotted names."""
        return [node for node, name in self.calls if name in names]

    def methods(self, *names: str) -> Iterator[tuple[ast.Call, str]]:
        """The calls of methods by these names, each with what it is called on."""
        for node, _ in self.calls:
            if isinstance(node.func, ast.Attribute) and node.func.attr in names:
                yield node, ast.unparse(node.func.value)

    @cached_property
    def classes(self) -> dict[str, list[str]]:
        """Name of each class -> dotted names of its bases."""
        return {
            node.name: [self.name_of(base) for base in node.bases]
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ClassDef)
        }

    def derived(self, *bases: str) -> list[ast.ClassDef]:
        """The classes that extend one of these, by dotted names or through another class of the file."""
        known = set(bases)
        for _ in self.classes:
            known |= {name for name, own in self.classes.items() if known & set(own)}
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef) and node.name in known]

    @cached_property
    def targets(self) -> dict[ast.expr, list[str]]:
        """Value of each assignment -> the names that it is assigned to, in their order."""
        found: dict[ast.expr, list[str]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                names: list[str] = []
                for target in node.targets:
                    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                    names += [ast.unparse(part) for part in parts]
                found[node.value] = names
        return found

    @cached_property
    def _functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [
            node for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]

    def validates(self, node: ast.expr) -> bool:
        """Whether code is in a function that validates, by the function's name."""
        around = (each for each in self._functions if each.lineno <= node.lineno <= (each.end_lineno or 0))
        return any(VALIDATES.search(each.name) for each in around)

    @cached_property
    def loop_lines(self) -> set[int]:
        """The lines inside of loops."""
        loops = [node for node in ast.walk(self.tree) if isinstance(node, (ast.For, ast.While))]
        return {line for loop in loops for line in range(loop.lineno, (loop.end_lineno or 0) + 1)}

    def change(self, node: ast.AST, message: str, fix: str, code: str, *, severity: str) -> Finding:
        """A finding at a place of the file."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        origin = Origin(f"{self.file}:{line}", file=str(self.file), line=line, column=column)
        problem = Problem(key="", origin=origin, message=message, fix=fix, code=code)
        return Finding(severity=severity, problem=problem)


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    """The value of the first keyword argument by one of these names."""
    return next((each.value for each in call.keywords if each.arg in names), None)


def metrics_in(nodes: Iterable[ast.AST]) -> list[str]:
    """Names of variables in some code that look like metrics."""
    found = [
        node.id
        for root in nodes
        for node in ast.walk(root)
        if isinstance(node, ast.Name) and METRIC.search(node.id)
    ]
    return list(dict.fromkeys(found))
