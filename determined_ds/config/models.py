"""Models of hyperparameters: fields with type, default and meaning, read out of a document with every problem at once.

A model is a frozen dataclass. A value that is plainly of its field's type is taken; every other one is judged by
pydantic, which is imported only then, since its import takes a third of a whole ``det-ds check``. What pydantic finds
is said in our own words.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, field, fields
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from determined_ds.documents.document import Document, KeyPath, one_of
from determined_ds.documents.text import KINDS, kind_of, type_fix
from determined_ds.errors import Problem

AUTO = "auto"
LARGEST = 2**31 - 1


class Range(NamedTuple):
    """The least and the largest value of a number, both included."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "ge": self.low, "le": self.high}


Size = Annotated[int, Range(1, LARGEST)]
Count = Annotated[int, Range(0, LARGEST)]


def option(default: Any, meaning: str, **about: Any) -> Any:
    """A field of a model.

    Args:
        default: Its default, or what makes it.
        meaning: In a sentence, for the reference page.
        about: ``auto``: "auto" is as if it were absent. ``choices``: the strings that it may be. ``form``: how it is
            written, where a reader of its own reads it. ``wanted`` and ``fix``: what to say of a value at fault, where
            its type does not say it.
    """
    metadata = {"description": meaning, **about}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def _options(model: type) -> dict[str, tuple[Any, Callable[[Any], bool], Mapping[str, Any]]]:
    """Of each field that is read by its type alone: the type, its test and the rest."""
    return {
        each.name: (hint, _plain_test(hint), each.metadata)
        for each, hint in _hinted(model)
        if "form" not in each.metadata
    }


def _hinted(model: type) -> Iterator[tuple[Field[Any], Any]]:
    hints = get_type_hints(model, include_extras=True)
    for each in fields(model):
        choices = each.metadata.get("choices")
        yield each, Literal[choices] if choices else hints[each.name]


@functools.cache
def _plain_test(hint: Any) -> Callable[[Any], bool]:
    """What tells that a value is of a type, for most of the good ones."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: True
    if origin is Annotated:
        is_plain, (allowed,) = _plain_test(args[0]), args[1:]
        return lambda value: is_plain(value) and allowed.low <= value <= allowed.high
    if origin in (Union, types.UnionType):
        tests = [_plain_test(each) for each in args if each is not type(None)]
        return tests[0] if len(tests) == 1 else lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in args
    if origin in (list, dict):
        is_plain = _plain_test(args[-1])
        return lambda value: (
            type(value) is origin and all(map(is_plain, value.values() if origin is dict else value))
        )
    return lambda value: type(value) is hint


def read_model(model: type, document: Document, path: KeyPath, problems: list[Problem]) -> dict[str, Any]:
    """The fields of a model that are given and sound.

    A field that is null is as absent, and so is one that is "auto", where that means something.

    Args:
        model: A dataclass of :func:`option` s.
        document: The hyperparameters.
        path: Of the mapping that holds the fields; () for the whole document.
        problems: One is added for each value at fault.
    """
    section: dict[str, Any] = document.get(path)
    values: dict[str, Any] = {}
    options = _options(model)
    for name in section:  # other values are not looked at: a check of a search records what a decision reads
        value = section[name] if name in options else None
        if value is None:
            continue
        hint, is_plain, about = options[name]
        if is_plain(value):
            values[name] = value
        elif not (value == AUTO and "auto" in about):
            found = read_value(hint, document, (*path, name), problems, about)
            values |= {} if found is None else {name: found}
    return values


def read_value(
    hint: Any,
    document: Document,
    path: KeyPath,
    problems: list[Problem],
    about: Mapping[str, Any] | None = None,
) -> Any:
    """The value at a path, if it is of a type; else None, and a problem is added."""
    value, about = document.get(path), about or {}
    if _plain_test(hint)(value):
        return value
    from pydantic import ValidationError

    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
    kind, limits = error["type"], error.get("ctx", {})
    if isinstance(value, (dict, list)) and error["loc"]:  # of a value in it, or a type that it might be
        step = error["loc"][0]
        if step in (value if isinstance(value, dict) else range(len(value))):
            path, value = (*path, step), value[step]  # type: ignore[index]
    if kind == "greater_than_equal":
        fix = "write a positive number" if limits["ge"] == 1 else f"write {limits['ge']} or more"
        problem = document.problem(path, f"must be {limits['ge']} or more", fix, "out-of-range")
    elif kind == "less_than_equal":
        fix = about.get("fix", "write a smaller number")
        problem = document.problem(path, f"must be at most {limits['le']}", fix, "out-of-range")
    elif kind == "literal_error":
        kinds = [each for each in get_args(hint) if get_origin(each) is Literal] or [hint]
        message = f"is not a valid {str(path[-1]).replace('_', ' ')}"
        code = "out-of-range" if path[:-1] else "wrong-type"
        problem = document.problem(path, message, one_of(get_args(kinds[0]), value), code)
    else:
        named = {"int": int, "bool": bool, "string": str, "dict": dict, "list": list, "float": float}
        wanted = named.get(kind.removesuffix("_type"), str)
        fix = about.get("fix") or type_fix(wanted, value)
        problem = wrong_type(document, path, about.get("wanted", KINDS[wanted]), fix)
    problems.append(problem)
    return None


@functools.cache
def _adapter(hint: Any) -> Any:
    """Pydantic's judge of a type."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True))


def wrong_type(document: Document, path: KeyPath, wanted: str, fix: str) -> Problem:
    """The problem of a value of another type than is wanted."""
    message = f"must be {wanted}, not {kind_of(document.get(path))}"
    return document.problem(path, message, fix, "wrong-type")
