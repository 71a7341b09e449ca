"""Sections of the experiment YAML as typed objects: one parser, which reports every wrong key at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from determined_ds.errors import ConfigError, Problem

S = TypeVar("S", bound="Section")

KINDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "string": "a non-empty string",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


class Section(BaseModel):
    """Base of a section: each key is a field with a default, and bounds where it has some.

    The requirement that a message states is made from the field's type and bounds; ``Field(description=...)``
    replaces it.
    """

    model_config = ConfigDict(frozen=True, strict=True)


def parse_section(
    kind: type[S], given: Mapping[str, Any] | None, *, section: str = "data", closed: bool = True
) -> S:
    """Check keys and values, before any file is read.

    Args:
        kind: The section's fields.
        given: What the experiment YAML has there.
        section: Its name in the YAML.
        closed: Whether unknown keys are errors; ``hyperparameters`` also holds keys of the library.

    Raises:
        ConfigError: Everything that is wrong.
    """
    problems = section_problems(kind, given, section=section, closed=closed)
    if problems:
        raise ConfigError(problems)
    return kind(**_known(kind, given or {}))


def section_problems(
    kind: type[S], given: Any, *, section: str = "data", closed: bool = True
) -> list[Problem]:
    """What is wrong with a section; see :func:`parse_section`."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        fix = f"{section}: {{{next(iter(kind.model_fields))}: ...}}"
        return [Problem(key=section, value=given, message="must be a mapping of keys to values.", fix=fix)]
    problems = []
    for name in given if closed else ():
        if name not in kind.model_fields:
            nearest = closest(str(name), kind.model_fields)
            fix = (
                f"did you mean {section}.{nearest}?" if nearest else f"one of {', '.join(kind.model_fields)}"
            )
            problems.append(
                Problem(key=f"{section}.{name}", value=given[name], message="no such key.", fix=fix)
            )
    try:
        kind(**_known(kind, given))
    except ValidationError as error:
        wrong = dict.fromkeys(str(item["loc"][0]) for item in error.errors())
        problems += [_wrong_value(kind, name, given[name], section) for name in wrong]
    return problems


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like ``word``, if one is."""
    return next(iter(difflib.get_close_matches(word.lower(), known, n=1)), None)


def _known(kind: type[S], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in kind.model_fields if name in given}


def _wrong_value(kind: type[S], name: str, value: Any, section: str) -> Problem:
    schema = kind.model_json_schema()["properties"][name]
    default = kind.model_fields[name].default
    nearest = closest(value, _enum(schema)) if isinstance(value, str) else None
    right = nearest or ("null" if default is None else str(default).lower())
    return Problem(
        key=f"{section}.{name}",
        value=value,
        message=f"must be {_requirement(schema)}.",
        fix=f"{section}.{name}: {right}",
    )


def _enum(schema: Mapping[str, Any]) -> list[str]:
    return [str(value) for each in schema.get("anyOf", [schema]) for value in each.get("enum", ())]


def _requirement(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: ``a whole number at least 1 or null``."""
    if "description" in schema:
        return str(schema["description"])
    if "anyOf" in schema:
        return " or ".join(map(_requirement, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    bounds = {word: f"{schema[key]:g}" for key, word in BOUNDS.items() if key in schema}
    if bounds.keys() == {"above", "below"}:
        return f"{KINDS[schema['type']]} between {bounds['above']} and {bounds['below']} (exclusive)"
    return " ".join([KINDS[schema["type"]], " and ".join(map(" ".join, bounds.items()))]).rstrip()
