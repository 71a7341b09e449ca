"""Prose against code, out of the standard library of the running Python: texts and labels that every machine has.

Prose are the docstrings, code the bodies of the functions without them.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from model_defs.common.files import Document, standard_library_files

PROSE, CODE = "prose", "code"
# Of either: what is shorter says little, and what is longer only takes time.
MIN_CHARACTERS, MAX_CHARACTERS = 40, 2000
# Of source, in whole modules: more takes seconds to parse on every start, and teaches nothing new.
MAX_BYTES = 2 * 2**20
# A module as long as this would be much of all there is.
MAX_MODULE_BYTES = 2**17


class Row(NamedTuple):
    """A text, its name (its module, or its file and row), and its label: a class by name, or by number from 0."""

    name: str
    text: str
    label: str | int


def prose_and_code(max_bytes: int = MAX_BYTES) -> list[Row]:
    """Docstrings and function bodies; each row's name is its module, and no text is there twice.

    Args:
        max_bytes: Modules are taken up to this sum of their sizes, in an order that their names decide.
    """
    rows: dict[str, Row] = {}
    num_bytes = 0
    documents = [each for each in standard_library_files() if len(each.content) <= MAX_MODULE_BYTES]
    for document in sorted(documents, key=lambda each: hashlib.sha256(each.name.encode()).digest()):
        num_bytes += len(document.content)
        if num_bytes > max_bytes:
            break
        for row in _rows_of(document):
            rows.setdefault(row.text, row)
    return list(rows.values())


def _rows_of(document: Document) -> Iterator[Row]:
    """In the order in which they begin."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are to go out of the language
            tree = ast.parse(document.content)
            lines = document.content.decode("utf-8").splitlines(keepends=True)
    except (SyntaxError, ValueError):
        return  # a template, or in another encoding
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
    for _, content, label in sorted(found):
        if MIN_CHARACTERS <= len(content) <= MAX_CHARACTERS:
            yield Row(document.name, content, label)
