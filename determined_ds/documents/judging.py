"""JSON Schema, as far as DeepSpeed's and Determined's schemas use it: draft 7, and the keywords that Determined adds.

The package jsonschema takes nearly as long to load as a whole ``det-ds check`` runs. The tests hold this judge against
it, on configurations that are made from the schemas. A null counts as absent where a key may be absent.

Source of the added keywords: determined 0.38.1, ``master/pkg/schemas/extensions``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from determined_ds.documents.document import KeyPath
from determined_ds.documents.text import JSON_TYPES

Json = Any
_BOUNDS: dict[str, Callable[[float, float], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


class Fault(NamedTuple):
    """What a schema refuses at one place.

    Beside the keywords of schemas there are ``missing`` for a key that is required, ``unknown`` for one that is not
    known, and ``choice`` for a value that is none of those that decide a union.
    """

    path: KeyPath  # of the value; of a key that is missing, its own
    keyword: str
    value: Json  # None where nothing stands there
    schema: Json  # the one that has the keyword; of a key, that of its mapping
    detail: Any = (
        None  # the keyword's value, message of a check, other side of a comparison, or what to choose from
    )
    meant: str = ""  # the key beside it that an unknown one was probably meant for


def is_of(value: Json, kind: str) -> bool:
    """Whether a value is of one of JSON Schema's types: 1.0 is an integer too; true is not."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind not in ("number", "integer") and isinstance(value, JSON_TYPES[kind])


def _equal(one: Json, other: Json) -> bool:
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def faults(
    schema: Json,
    value: Json,
    *,
    named: Callable[[str], Json] | None = None,
    wildcard: str | None = None,
    path: KeyPath = (),
) -> Iterator[Fault]:
    """Everything that a schema refuses in a value.

    Args:
        schema: It. ``removed`` and ``deprecated`` refuse every value, with why as the detail.
        value: Plain data.
        named: A schema by its ``$ref``.
        wildcard: A text that is of every type and of every enum; None where there is none.
        path: Where the value stands.
    """

    def below(schema: Json, value: Json, *steps: str | int) -> Iterator[Fault]:
        return faults(schema, value, named=named, wildcard=wildcard, path=(*path, *steps))

    def fits(schema: Json, value: Json) -> bool:
        return next(below(schema, value), None) is None

    if isinstance(schema, bool):
        if not schema:
            yield Fault(path, "false", value, schema)
        return
    fields: dict[str, Json] = value if isinstance(value, dict) else {}
    known: dict[str, Json] = schema.get("properties", {})
    is_number, is_wild = is_of(value, "number"), wildcard is not None and value == wildcard
    for keyword, wanted in schema.items():
        holds = True
        if keyword == "type":
            holds = is_wild or any(
                is_of(value, kind) for kind in ([wanted] if isinstance(wanted, str) else wanted)
            )
        elif keyword in ("enum", "const"):
            choices = wanted if keyword == "enum" else [wanted]
            folds = schema.get("ignoreCase") and isinstance(value, str)
            holds = is_wild or any(
                _equal(each, value) or (folds and value.lower() == str(each).lower()) for each in choices
            )
        elif keyword in _BOUNDS:
            holds = not is_number or _BOUNDS[keyword](value, wanted)
        elif keyword == "minLength":
            holds = not isinstance(value, str) or len(value) >= wanted
        elif keyword == "pattern":  # Go's ``$`` is the end; Python's also stands before a last newline
            holds = not isinstance(value, str) or bool(re.search(wanted.replace("$", r"\Z"), value))
        elif keyword in ("removed", "deprecated"):
            holds = False
        elif keyword == "properties":
            for key, item in fields.items():
                if key in wanted:
                    yield from below(wanted[key], item, key)
        elif keyword == "additionalProperties":
            for key, item in fields.items():
                if key in known:
                    continue
                if wanted is False:
                    yield Fault((*path, key), "unknown", item, schema)
                else:
                    yield from below(wanted, item, key)
        elif keyword == "items":
            for index, item in enumerate(value if isinstance(value, list) else ()):
                yield from below(wanted, item, index)
        elif keyword == "required":
            for key in wanted if isinstance(value, dict) else ():
                if key not in fields or (fields[key] is None and not fits(known.get(key, True), None)):
                    yield Fault((*path, key), "missing", fields.get(key), schema)
        elif keyword == "eventuallyRequired":  # once the cluster has filled in its defaults
            for key in wanted if isinstance(value, dict) else ():
                if fields.get(key) is None:
                    yield Fault((*path, key), "missing", None, schema, "eventually")
        elif keyword in ("$ref", "optionalRef"):
            if named is not None and (keyword == "$ref" or value is not None):
                yield from below(named(wanted), value)
        elif keyword == "allOf":
            for each in wanted:
                yield from below(each, value)
        elif keyword == "anyOf":
            holds = any(fits(each, value) for each in wanted)
        elif keyword == "not":
            holds = not fits(wanted, value)
        elif keyword == "if":
            if fits(wanted, value):
                yield from below(schema.get("then", True), value)
        elif keyword == "union":
            items = [named(each["$ref"]) if named and "$ref" in each else each for each in wanted["items"]]
            keys = [each["unionKey"] for each in wanted["items"]]
            yield from _of_union(list(zip(keys, items, strict=True)), value, path, below)
        elif keyword == "checks":
            for message, check in wanted.items():
                if "compareProperties" in check:  # it names the key by itself
                    yield from below(check, value)
                elif not fits(check, value):
                    yield Fault(path, "checks", value, schema, message)
        elif keyword == "disallowProperties":
            for key in wanted.keys() & fields.keys():
                yield Fault((*path, key), "checks", fields[key], schema, wanted[key])
        elif keyword == "compareProperties":
            yield from _compared(wanted, fields, path, schema)
        if not holds:
            yield Fault(path, keyword, value, schema, wanted)


def _of_union(
    items: list[tuple[str, Json]], value: Json, path: KeyPath, below: Callable[[Json, Json], Iterator[Fault]]
) -> Iterator[Fault]:
    """Nothing where an item fits; else the faults of the item that was meant, or one of the whole union."""
    fields = value if isinstance(value, dict) else {}

    def is_meant(key: str, item: Json) -> bool:
        """By its ``unionKey``; where that is never, by its type."""
        kind, _, rest = key.partition(":")
        if kind == "not":
            return not is_meant(rest, item)
        if kind == "const":
            name, _, wanted = rest.partition("=")
            return bool(fields.get(name) == wanted)
        if kind == "never":
            consts = {
                name: sub["const"] for name, sub in item.get("properties", {}).items() if "const" in sub
            }
            kinds = [item["type"]] if isinstance(item.get("type"), str) else item.get("type", ())
            of_kind = any(is_of(value, each) for each in kinds)
            return of_kind and all(fields.get(name) == const for name, const in consts.items())
        if kind == "type":
            return is_of(value, rest)
        return {"always": True, "singleproperty": list(fields) == [rest], "hasattr": rest in fields}[kind]

    meant: list[Fault] | None = None
    for key, item in items:
        this = is_meant(key, item)
        if not this and key.startswith("const:"):
            continue  # it requires the key and its value
        found = [*below(item, value)]
        if not found:
            return
        meant = found if this and meant is None else meant
    if meant is not None:  # if it is not what it is read as, what is in it need not be either
        yield from [each for each in meant if each.keyword == "checks" and each.path == path] or meant
        return
    known = {key: sub for _, item in items for key, sub in item.get("properties", {}).items()}
    consts = [(key, sub["const"]) for _, item in items for key, sub in item.get("properties", {}).items()
              if isinstance(sub, dict) and "const" in sub]  # fmt: skip
    texts, whole = [item["const"] for _, item in items if "const" in item], {"properties": known}
    unknown = [key for key in fields if key not in known]
    if isinstance(value, str) and texts:
        yield Fault(path, "choice", value, whole, texts)
    elif isinstance(value, dict) and consts:
        key, choices = consts[0][0], [text for _, text in consts]
        yield Fault((*path, key), "choice" if key in value else "missing", value.get(key), whole, choices)
    elif unknown:
        yield from (Fault((*path, key), "unknown", value[key], whole) for key in unknown)
    else:
        yield Fault(path, "union", value, whole)


def _compared(rule: dict[str, str], fields: dict[str, Json], path: KeyPath, schema: Json) -> Iterator[Fault]:
    kind = rule["type"]
    a: Json = fields.get(rule["a"])
    b: Json = fields.get(rule["b"])
    if kind != "a_is_subdir_of_b":
        if is_of(a, "number") and is_of(b, "number") and not (a < b or (a == b and kind == "a<=b")):
            yield Fault((*path, rule["b"]), "compared", b, schema, (kind, rule["a"], a))
    elif isinstance(a, str) and (b is None or isinstance(b, str)):
        # As the master has it: a relative path that does not climb, or a string with the parent for its prefix.
        # Go's filepath.Clean is normpath, but for two leading slashes, which become one.
        inner, parent = (re.sub("^//", "/", posixpath.normpath(text)) for text in (a, b or "/"))
        if not (inner.startswith(parent) if inner.startswith("/") else not inner.startswith("..")):
            yield Fault((*path, rule["a"]), "compared", a, schema, (kind, rule["b"], b))
