"""A value -> what a schema refuses in it: JSON Schema draft 7 as far as Determined uses it, and its own keywords.

A null counts as absent wherever a key may be absent, and ``$ref`` hides its neighbours. ``default`` and ``eventually``
are the master's to apply. Source: determined 0.38.1, ``master/pkg/schemas/extensions``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from determined_ds.documents.document import KeyPath
from determined_ds.documents.values import is_of
from determined_ds.experiment.schema.of_master import schema as named

Json = Any


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What a keyword of a schema refuses.

    Args:
        path: Of what is refused; of a key that is missing, its own.
        value: What stands there; None where nothing does.
        keyword: The schema's; ``missing`` and ``null`` for a key that it requires, ``unknown`` for one that it does not
            know, ``choice`` for a value that is none of those that decide a union.
        schema: The one that has the keyword; of a key, that of its mapping.
        detail: The message of a check, the other value of a comparison, the values to choose from.
    """

    path: KeyPath
    value: Json
    keyword: str
    schema: dict[str, Json]
    detail: Any = None


def faults(schema: Json, value: Json, path: KeyPath = ()) -> list[Fault]:
    """Everything that a schema refuses in the value at ``path``; of two at one place, the later is the more exact."""
    schema = _resolved(schema)

    def refused(keyword: str, detail: Any = None) -> Fault:
        return Fault(path=path, value=value, keyword=keyword, schema=schema, detail=detail)

    if "type" in schema and not is_of(value, kinds_of(schema)):
        return [refused("type")]
    found = [
        refused(word) for word, holds in KEYWORDS.items() if word in schema and not holds(schema[word], value)
    ]
    if isinstance(value, dict):
        found += _in_mapping(schema, value, path)
    elif isinstance(value, list) and "items" in schema:
        found += [
            fault for at, item in enumerate(value) for fault in faults(schema["items"], item, (*path, at))
        ]
    for further in _handed_on_to(schema, value):
        found += faults(further, value, path)
    if "union" in schema:
        found += _in_union(schema["union"]["items"], value, path)
    for key, message in schema.get("disallowProperties", {}).items():
        if isinstance(value, dict) and key in value:
            found.append(_of_key("disallowed", schema, value, path, key, message))
    checks = [
        refused("checks", message)
        for message, check in schema.get("checks", {}).items()
        if not _compares(check) and faults(check, value)
    ]
    if checks and isinstance(schema.get("additionalProperties"), dict):
        return checks  # if it is not what it is read as, what is in it need not be either
    return found or checks


def _compares(check: Json) -> bool:
    """Whether a check is a comparison: those name the key by themselves."""
    return "compareProperties" in check


def _resolved(schema: Json) -> dict[str, Json]:
    while isinstance(schema, dict) and "$ref" in schema:
        schema = named(schema["$ref"])
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}


def kinds_of(schema: dict[str, Json]) -> list[str]:
    """The types that a schema takes, as it names them."""
    kinds = schema["type"]
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _is_number(value: Json) -> bool:
    return is_of(value, ("number",))


# Keyword -> whether it holds, of keywords that judge a value as a whole.
KEYWORDS: dict[str, Callable[[Json, Json], bool]] = {
    "const": lambda wanted, value: value == wanted,
    "enum": lambda choices, value: any(type(each) is type(value) and each == value for each in choices),
    "minimum": lambda least, value: not _is_number(value) or value >= least,
    "exclusiveMinimum": lambda least, value: not _is_number(value) or value > least,
    "maximum": lambda most, value: not _is_number(value) or value <= most,
    # Go's `$` is the end; Python's also stands before a last newline.
    "pattern": lambda text, value: (
        not isinstance(value, str) or bool(re.search(text.replace("$", r"\Z"), value))
    ),
    "not": lambda schema, value: bool(faults(schema, value)),
    "anyOf": lambda schemas, value: any(not faults(schema, value) for schema in schemas),
}


def _handed_on_to(schema: dict[str, Json], value: Json) -> list[Json]:
    further = list(schema.get("allOf", ()))
    if "optionalRef" in schema and value is not None:
        further.append(named(schema["optionalRef"]))
    if "if" in schema and not faults(schema["if"], value):
        further.append(schema["then"])
    further += [check for check in schema.get("checks", {}).values() if _compares(check)]
    return further


# --- Mappings -----------------------------------------------------------------------------------------------


def _of_key(
    keyword: str, schema: dict[str, Json], value: dict[str, Json], path: KeyPath, key: str, detail: Any = None
) -> Fault:
    return Fault(path=(*path, key), value=value.get(key), keyword=keyword, schema=schema, detail=detail)


def _in_mapping(schema: dict[str, Json], value: dict[str, Json], path: KeyPath) -> list[Fault]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    absent = list(_required(schema, value, path))
    found = [
        _of_key("null" if key in value else "missing", schema, value, path, key)
        for key in dict.fromkeys(absent)
    ]
    for key, item in value.items():
        if key not in known and others is False:
            found.append(_of_key("unknown", schema, value, path, key))
        elif key not in absent:
            found += faults(known.get(key, others), item, (*path, key))
    if "compareProperties" in schema:
        rule = schema["compareProperties"]
        holds, culprit, other = COMPARISONS[rule["type"]]
        if not holds(value.get(rule["a"]), value.get(rule["b"])):
            against = (rule[other], value.get(rule[other]))
            found.append(_of_key("compared", schema, value, path, rule[culprit], against))
    return found


def _required(schema: dict[str, Json], value: dict[str, Json], path: KeyPath) -> Iterator[str]:
    """The keys that are missing. What a checkpoint storage needs in the end, the cluster's own of its type has."""
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value or (value[key] is None and faults(known.get(key, True), None)):
            yield key
    if path[:1] != ("checkpoint_storage",):
        yield from (key for key in schema.get("eventuallyRequired", ()) if value.get(key) is None)


def _ordered(strictly: bool) -> Callable[[Json, Json], bool]:
    def holds(low: Json, high: Json) -> bool:
        return not (_is_number(low) and _is_number(high)) or low < high or (low == high and not strictly)

    return holds


def _is_below(path: Json, parent: Json) -> bool:
    """As the master has it: a relative path that does not climb, or a string with the parent for its prefix."""
    if not isinstance(path, str) or not isinstance(parent, (str, type(None))):
        return True
    clean = _clean(path)
    if not clean.startswith("/"):
        return not clean.startswith("..")
    return clean.startswith(_clean("/" if parent is None else parent))


def _clean(path: str) -> str:
    """Go's ``filepath.Clean``: normpath, but for two leading slashes, which become one."""
    return re.sub("^//", "/", posixpath.normpath(path))


# Whether it holds, which of the two is to be changed, and by what.
COMPARISONS: dict[str, tuple[Callable[[Json, Json], bool], str, str]] = {
    "a<b": (_ordered(True), "b", "a"),
    "a<=b": (_ordered(False), "b", "a"),
    "a_is_subdir_of_b": (_is_below, "a", "b"),
}


# --- Unions -------------------------------------------------------------------------------------------------


def _in_union(items: list[dict[str, Json]], value: Json, path: KeyPath) -> list[Fault]:
    """Nothing where an item fits; else the faults of the item that was meant, or one of the union."""
    schemas = [_resolved(item) for item in items]
    judged = [faults(schema, value, path) for schema in schemas]
    if not all(judged):
        return []
    for item, schema, found in zip(items, schemas, judged, strict=True):
        if _is_meant(item["unionKey"], schema, value):
            return found
    return _of_no_item(schemas, value, path)


def _is_meant(key: str, schema: dict[str, Json], value: Json) -> bool:
    """Whether a value was meant for an item, by its ``unionKey``; where that says never, by type and kind."""
    kind, _, rest = key.partition(":")
    keys = value if isinstance(value, dict) else {}
    if kind == "not":
        return not _is_meant(rest, schema, value)
    if kind == "const":
        name, _, wanted = rest.partition("=")
        return bool(keys.get(name) == wanted)
    if kind == "never":
        fits = "type" in schema and is_of(value, kinds_of(schema))
        return fits and all(keys.get(name) == wanted for name, wanted in _deciding(schema).items())
    return {
        "always": True,
        "type": kind == "type" and is_of(value, (rest,)),
        "singleproperty": list(keys) == [rest],
        "hasattr": rest in keys,
    }[kind]


def _deciding(schema: dict[str, Json]) -> dict[str, str]:
    """The key whose one value decides for an item, with that value; empty where there is none."""
    known = schema.get("properties", {})
    return {key: sub["const"] for key, sub in known.items() if isinstance(sub, dict) and "const" in sub}


def _of_no_item(schemas: list[dict[str, Json]], value: Json, path: KeyPath) -> list[Fault]:
    texts = [schema["const"] for schema in schemas if "const" in schema]
    if texts and isinstance(value, str):
        return [Fault(path=path, value=value, keyword="choice", schema={}, detail=texts)]
    union: dict[str, Json] = {
        "properties": {key: {} for schema in schemas for key in schema.get("properties", {})}
    }
    if isinstance(value, dict):
        deciding = [pair for schema in schemas for pair in _deciding(schema).items()]
        if deciding:
            key, choices = deciding[0][0], [text for _, text in deciding]
            return [_of_key("choice" if key in value else "missing", union, value, path, key, choices)]
        unknown = faults(union | {"additionalProperties": False}, value, path)
        if unknown:
            return unknown
    return [Fault(path=path, value=value, keyword="union", schema=union)]
