"""Values of hyperparameters, read by type and range; what is wrong becomes a problem."""

from __future__ import annotations

from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.values import KINDS, kind_of, type_fix
from determined_ds.errors import Problem

AUTO = "auto"
LARGEST = 2**31 - 1


def wrong_type(document: Document, path: KeyPath, wanted: str, fix: str) -> Problem:
    """The problem of a value of another type than is wanted."""
    message = f"must be {wanted}, not {kind_of(document.get(path))}"
    return document.problem(path, message, fix, "wrong-type")


def optional_size(document: Document, path: KeyPath, problems: list[Problem]) -> int | None:
    """An integer >= 1; None where it is absent or "auto"."""
    if document.get(path) in (None, AUTO):
        return None
    return number(document, path, problems)


def number(
    document: Document, path: KeyPath, problems: list[Problem], low: int = 1, high: int = LARGEST
) -> int | None:
    """An integer from ``low`` to ``high``; None where it is another, which is added to the problems."""
    value = document.get(path)
    if isinstance(value, bool) or not isinstance(value, int):
        problems.append(wrong_type(document, path, KINDS[int], type_fix(int, value)))
        return None
    if low <= value <= high:
        return value
    message = f"must be {low} or more" if value < low else f"must be at most {high}"
    fix = "write a positive number" if value < low else "write a smaller number"
    problems.append(document.problem(path, message, fix, "out-of-range"))
    return None
