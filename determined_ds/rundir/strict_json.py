"""Dataclasses to strict JSON and back, by pydantic: every key known, every type right, every number in its range.

JSON knows no NaN: numbers that are not finite are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

from pydantic import (
    BeforeValidator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails, core_schema

from determined_ds.documents.document import nearest, refusal
from determined_ds.errors import NOT_GIVEN, ConfigError, Problem

MAX_PROBLEMS = 10  # a damaged list has one at every number
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
# In words of JSON, where pydantic's are of Python.
WORDS = {
    "dataclass_type": "must be a mapping",
    "missing": "is missing",
    "tuple_type": "must be a list",
    "unexpected_keyword_argument": "unknown key",
}
_NUMBERS = re.compile(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]")  # a list of them; JSON's strings hold no line feed
_Loaded = TypeVar("_Loaded")

Integer = Annotated[int, Field(strict=True)]
Real = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(lambda value: float(value) if value in NOT_FINITE else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else json.dumps(value), when_used="json"),
]


def one_of(choices: tuple[str, ...]) -> GetPydanticSchema:
    """A mark for a string that is one of these; for code it stays a ``str``."""
    return GetPydanticSchema(lambda _type, _handler: core_schema.literal_schema(list(choices)))


def json_text(value: Any, *, kind: str, version: int) -> str:
    """A dataclass as strict JSON.

    Args:
        value: A dataclass of strings, numbers, None, tuples of these, and tuples of dataclasses of the like.
        kind: What the file is; it goes first, with its format.
        version: Of the format.
    """
    data = {"kind": kind, "format": version, **TypeAdapter(type(value)).dump_python(value, mode="json")}
    text = json.dumps(data, indent=2, allow_nan=False)
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def from_json(
    cls: type[_Loaded], path: Path, *, kind: str, version: int, file: str = "results.json"
) -> _Loaded:
    """Read a dataclass that :func:`json_text` wrote.

    Args:
        cls: Of the dataclass.
        path: The file.
        kind: As it was written.
        version: The same.
        file: What the file is called, for messages.

    Raises:
        ConfigError: the file cannot be read, is not JSON, is of another kind or format, or holds keys, types or
            numbers that it cannot hold.
    """
    name = str(path)
    data = _parsed(path, name, f"give the path of a {file}")
    if not isinstance(data, dict) or data.pop("kind", None) != kind:
        raise refusal(name, f"is not a file of {kind}", f"give a {file} as det-ds writes it")
    found = data.pop("format", None)
    if type(found) is not int or found != version:
        message = f"this version reads format {version} only"
        fix = "read it with the version that wrote it, or measure again"
        raise ConfigError(
            Problem(key="format", value=found, origin=name, message=message, fix=fix, code="results-format")
        )
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as refused:
        errors = refused.errors(include_url=False)[:MAX_PROBLEMS]
        raise ConfigError([_problem(cls, error, name) for error in errors]) from None


def _parsed(path: Path, name: str, fix: str) -> Any:
    try:
        if path.exists() and not path.is_file():
            what = "folder" if path.is_dir() else "device or a pipe"
            raise refusal(name, f"is a {what}, not a file", fix)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise refusal(name, "no such file", fix) from None
    except (OSError, ValueError) as error:  # not UTF-8; or a path with a null byte in it
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise refusal(name, message, fix) from None
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise refusal(name, f"is not JSON: {error}", "it was cut off or damaged: measure again") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def _no_constant(constant: str) -> None:
    raise ValueError(f"{constant} without quotes is not a JSON number")


def _problem(cls: type, error: ErrorDetails, name: str) -> Problem:
    """An error of pydantic as a problem; an unknown key with the nearest known one."""
    kind, path = error["type"], error["loc"]
    fix = "it was changed or damaged since it was written: measure again"
    if kind == "unexpected_keyword_argument":
        for step in path[:-1]:
            if isinstance(step, str):  # a dataclass, or a tuple of them
                hint = get_type_hints(cls)[step]
                cls = next(iter(get_args(hint)), hint)
        meant = nearest(str(path[-1]), get_type_hints(cls))
        fix = f"did you mean {meant!r}?" if meant else "remove it"
    return Problem(
        key="".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:],
        value=NOT_GIVEN if kind == "missing" else error["input"],
        origin=name,
        message=WORDS.get(kind) or error["msg"].replace("Input should", "must"),
        fix=fix,
        code="results",
    )
