"""Tests see the package from outside: only ``package.py`` imports what is not public.

``white_box.txt`` lists, by room, the files that still know the inside of a room. Each goes when its room is redrawn,
and none is added.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
DOOR = TESTS / "package.py"
WHITE_BOX = TESTS / "white_box.txt"
# The public modules, and those that are started as programs.
NAMES = (
    "callbacks cli.main deepspeed errors transformers cli doctor script cluster.startup train train.__main__"
)
PUBLIC = {f"determined_ds.{name}" for name in NAMES.split()}
IMPORT_IN_TEXT = re.compile(r"(?:from|import) (determined_ds(?:\.\w+)+)")
NAME_AS_TEXT = re.compile(r"(determined_ds(?:\.[a-z_]+)+)(?::\w+)?")


def _modules(tree: ast.AST) -> Iterator[str]:
    """What a file imports, by a statement, in code that it hands to a Python, or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.islower())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from IMPORT_IN_TEXT.findall(node.value)
            named = NAME_AS_TEXT.fullmatch(node.value)
            yield from named.groups() if named else ()


def _inside(file: Path) -> set[str]:
    """Modules of the package that are not public, and other tests, that a file imports."""
    return {
        module
        for module in _modules(ast.parse(file.read_text()))
        if (module.startswith("determined_ds.") and module not in PUBLIC and _is_module(module))
        or re.match(r"tests\.(.*\.)?test_\w+$", module)
    }


def _is_module(name: str) -> bool:
    path = TESTS.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_only_package_py_knows_the_inside_of_the_package() -> None:
    listed = {line for line in WHITE_BOX.read_text().split("\n") if line and not line.startswith("#")}
    knowing = {
        str(file.relative_to(TESTS)): modules
        for file in TESTS.rglob("*.py")
        if file != DOOR and (modules := _inside(file))
    }
    new = {name: sorted(modules) for name, modules in knowing.items() if name not in listed}
    assert not new, "import public names or tests.package"
    assert listed == knowing.keys(), "these know nothing inside any more: remove them from white_box.txt"
