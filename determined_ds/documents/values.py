"""Problems collected while a document is checked, and the words for the kinds of its values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from determined_ds.documents.document import Document, KeyPath, unknown_keys
from determined_ds.errors import Problem


class Findings:
    """Collects every problem of a document instead of stopping at the first."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.constants: list[KeyPath] = []  # paths of {type: const, val: ...}

    def add(self, path: KeyPath, message: str, fix: str, code: str = "invalid") -> None:
        self.problems.append(self.document.problem(path, message, fix, code))

    def unknown(
        self, path: KeyPath, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
    ) -> None:
        self.problems += unknown_keys(self.document, path, known, elsewhere)

    def section(
        self, path: KeyPath, known: Iterable[str], elsewhere: Mapping[str, str] | None = None
    ) -> None:
        """Check that there is a mapping at ``path``, or nothing, with known keys."""
        self.typed(path, dict, {})
        self.unknown(path, known, elsewhere)

    def typed(self, path: KeyPath, kind: type, default: Any) -> Any:
        """The value at ``path`` if it is of ``kind``; else the default, and a problem unless it is absent."""
        value = self.document.get(path)
        if value is None:
            return default
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        self.add(path, f"must be {KINDS[kind]}, not {kind_of(value)}", type_fix(kind, value), "wrong-type")
        return default


# JSON Schema's name of a type -> ours.
JSON_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def is_of(value: Any, names: Iterable[str]) -> bool:
    """Whether a value is of one of JSON Schema's types: 1.0 is an integer too; true is not."""
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, (int, float)):
        return "number" in names or ("integer" in names and (isinstance(value, int) or value.is_integer()))
    return any(isinstance(value, JSON_TYPES[name]) for name in names)


MAX_EXACT = 2**53  # floats beyond it are no longer every integer
KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    float: "a number",
}


def kind_of(value: Any) -> str:
    """What a YAML value is, in words: ``a string``, ``an integer``, ``null`` ..."""
    if value is None:
        return "null"
    return KINDS.get(type(value), type(value).__name__)


def type_fix(kind: type, value: Any) -> str:
    """How to write a value of the right type; unquotes numbers where that is all it takes."""
    if kind in (int, float) and isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return f"write {KINDS[kind]}"
        if math.isfinite(number) and (kind is float or number.is_integer()):
            return f"remove the quotes: {int(number) if number.is_integer() else number}"
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT:
        return f"write {int(value)}"
    return f"write {KINDS[kind]}"


def as_plain(data: Any) -> Any:
    """Mappings as dicts and tuples as lists, all the way down: attrdict turns lists to tuples."""
    if isinstance(data, Mapping):
        return {str(key): as_plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [as_plain(value) for value in data]
    return data
