"""Prose against code, out of the standard library of the running Python: texts and labels that every machine has.

Prose are the docstrings, code the bodies of the functions without them.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator

from model_defs.common.rows import Row, standard_library

PROSE, CODE = "prose", "code"
# Of either: what is shorter says little, and what is longer only takes time.
MIN_CHARACTERS, MAX_CHARACTERS = 40, 2000
# Of source, in whole modules: more takes seconds to parse on every start, and teaches nothing new.
MAX_BYTES = 2 * 2**20
# A module as long as this would be much of all there is.
MAX_MODULE_BYTES = 2**17


def prose_and_code() -> list[Row]:
    """Docstrings and function bodies; each row's name is its module, and no text is there twice."""
    rows: dict[str, Row] = {}
    num_bytes = 0
    # In an order that their names decide, by another hash than that of the split, up to MAX_BYTES.
    for module in sorted(standard_library(), key=lambda each: hashlib.md5(each.name.encode()).digest()):
        size = len(module.text.encode())
        if size > MAX_MODULE_BYTES:
            continue
        num_bytes += size
        if num_bytes > MAX_BYTES:
            break
        for row in _rows_of(module):
            rows.setdefault(row.text, row)
    return list(rows.values())


def _rows_of(module: Row) -> Iterator[Row]:
    """In the order in which they begin."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are to go out of the language
            tree = ast.parse(module.text)
    except (SyntaxError, ValueError):
        return  # a template
    lines = module.text.splitlines(keepends=True)
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is not None:
            found.append((node.body[0].lineno, docstring, PROSE))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[docstring is not None :]
            if body and body[0].lineno > node.lineno:
                code = "".join(lines[body[0].lineno - 1 : node.end_lineno])
                found.append((body[0].lineno, textwrap.dedent(code).strip(), CODE))
    for _, text, label in sorted(found):
        if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS:
            yield Row(module.name, text, label)
