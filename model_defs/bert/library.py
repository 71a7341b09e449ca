"""Prose against code, out of the standard library of the running Python: texts and labels that every machine has.

Prose are the docstrings, code the bodies of the functions without them.
"""

from __future__ import annotations

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator

from model_defs.bert.tables import Row
from model_defs.common.documents import Document, standard_library_files

PROSE, CODE = "prose", "code"
# Of either: what is shorter says little, and what is longer only takes time.
MIN_CHARACTERS, MAX_CHARACTERS = 40, 2000
# Of source, in whole modules: more takes seconds to parse on every start, and teaches nothing new.
MAX_BYTES = 2 * 2**20
# A module as long as this would be much of all there is.
MAX_MODULE_BYTES = 2**17


def prose_and_code(max_bytes: int = MAX_BYTES) -> list[Row]:
    """Docstrings and function bodies; each row's name is ``module:line``, and no text is there twice.

    Args:
        max_bytes: Modules are taken up to this sum of their sizes, in an order that their names decide.
    """
    rows: list[Row] = []
    seen: set[str] = set()
    for document in _modules(max_bytes):
        for row in _rows_of(document):
            if row.text not in seen:
                seen.add(row.text)
                rows.append(row)
    return rows


def module_of(row: Row) -> str:
    """The module that a row of :func:`prose_and_code` is out of."""
    return row.name.rpartition(":")[0]


def _modules(max_bytes: int) -> Iterator[Document]:
    documents = standard_library_files()
    num_bytes = 0
    for document in sorted(documents, key=lambda each: hashlib.sha256(each.name.encode()).digest()):
        if len(document.content) > MAX_MODULE_BYTES:
            continue
        num_bytes += len(document.content)
        if num_bytes > max_bytes:
            return
        yield document


def _rows_of(document: Document) -> Iterator[Row]:
    """In the order in which they begin."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are to go out of the language
            tree = ast.parse(document.content)
            text = document.content.decode("utf-8")
    except (SyntaxError, ValueError):
        return  # a template, or in another encoding
    lines = text.splitlines(keepends=True)
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
    for line, content, label in sorted(found):
        if MIN_CHARACTERS <= len(content) <= MAX_CHARACTERS:
            yield Row(name=f"{document.name}:{line}", text=content, label=label)
