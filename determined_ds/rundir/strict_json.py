"""Dataclasses to strict JSON and back, by pydantic: every key known, every type right, every number in its range.

JSON knows no NaN: numbers that are not finite are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, GetPydanticSchema, PlainSerializer, TypeAdapter, ValidationError
from pydantic_core import core_schema

from determined_ds.documents.document import refusal
from determined_ds.errors import ConfigError, Problem

MAX_PROBLEMS = 10  # a damaged list has one at every number
AGAIN = "it was cut off, damaged or changed since it was written: measure again"
NOT_FINITE = ("NaN", "Infinity", "-Infinity")
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


def from_json(cls: type[_Loaded], path: Path, *, kind: str, version: int) -> _Loaded:
    """Read a dataclass that :func:`json_text` wrote.

    Args:
        cls: Of the dataclass.
        path: The file.
        kind: As it was written.
        version: The same.

    Raises:
        ConfigError: the file cannot be read, is not JSON, is of another kind or format, or holds keys, types or
            numbers that it cannot hold.
    """
    name = str(path)
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise refusal(name, f"cannot be read: {error.strerror}", "give the path of a results.json") from None
    except (ValueError, RecursionError) as error:  # a ValueError: of a path with a null byte in it, too
        raise refusal(name, f"is not JSON: {error}", AGAIN) from None
    if not isinstance(data, dict) or data.pop("kind", None) != kind:
        raise refusal(name, f"is not a file of {kind}", "give a results.json as det-ds writes it")
    if (found := data.pop("format", None)) != version:
        message = f"this version reads format {version} only"
        fix = "read it with the version that wrote it, or measure again"
        raise ConfigError(
            Problem(key="format", value=found, origin=name, message=message, fix=fix, code="results-format")
        )
    try:
        return TypeAdapter(cls).validate_python(data)
    except ValidationError as refused:
        problems = []
        for found in refused.errors(include_url=False)[:MAX_PROBLEMS]:
            key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in found["loc"])[1:]
            message, value = found["msg"].replace("Input should", "must"), found["input"]
            problems.append(
                Problem(key=key, value=value, origin=name, message=message, fix=AGAIN, code="results")
            )
        raise ConfigError(problems) from None
