"""JSON Schema, as far as DeepSpeed's, Determined's and our own schemas use it, and the words for what it refuses.

Draft 7, with the keywords that Determined adds (determined 0.38.1, ``master/pkg/schemas/extensions``) and some of our
own: ``removed`` and ``deprecated`` refuse every value, ``exact`` refuses 1.0 for an integer, ``auto`` lets "auto" stand
for any value, and ``fix`` is what to write instead. A null counts as absent where a key may be absent. The package
jsonschema takes as long to load as a whole ``det-ds check`` runs.
"""

from __future__ import annotations

import operator
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from determined_ds.documents.document import Document, KeyPath, one_of, unknown_key
from determined_ds.documents.text import KINDS, kind_of
from determined_ds.errors import NOT_GIVEN, Problem

Json = Any
# Keyword of values of one type -> that type, whether such a value holds it, and the same in words.
_OF_TYPE: dict[str, tuple[str, Callable[[Any, Any], bool], str]] = {
    "minimum": ("number", operator.ge, "{} or more"),
    "exclusiveMinimum": ("number", operator.gt, "more than {}"),
    "maximum": ("number", operator.le, "at most {}"),
    "exclusiveMaximum": ("number", operator.lt, "less than {}"),
    "exact": ("number", lambda number, _: isinstance(number, int), ""),
    "minLength": ("string", lambda text, least: len(text) >= least, ""),
    # Go's ``$`` is the end; Python's also stands before a last newline.
    "pattern": ("string", lambda text, form: bool(re.search(form.replace("$", r"\Z"), text)), ""),
    "minItems": ("array", lambda items, least: len(items) >= least, ""),
    "minProperties": ("object", lambda fields, least: len(fields) >= least, ""),
    "maxProperties": ("object", lambda fields, most: len(fields) <= most, ""),
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
    detail: Any = None  # the keyword's value, message of a check, other side of a comparison, or the choices
    meant: str = ""  # the key beside it that an unknown one was probably meant for


Judge = Callable[[Json, Json, KeyPath], Iterator[Fault]]
# Keywords that say most of a place; of the others the last is the most exact.
_FIRST = {"removed": 0, "deprecated": 0, "unknown": 0, "missing": 1, "type": 2}


def faults(
    schema: Json,
    value: Json,
    path: KeyPath = (),
    *,
    named: Callable[[str], Json] = lambda _: True,
    takes_auto: bool = False,
) -> dict[KeyPath, Fault]:
    """Everything that a schema refuses in a value: of each place the fault that says most.

    Args:
        schema: It.
        value: Plain data.
        path: Where it stands.
        named: A schema by its ``$ref``.
        takes_auto: Whether "auto" is of every type and of every enum, as if each had the keyword ``auto``.
    """

    def fits(schema: Json, value: Json) -> bool:
        return next(judge(schema, value, ()), None) is None

    def judge(schema: Json, value: Json, path: KeyPath) -> Iterator[Fault]:
        if isinstance(schema, bool):
            if not schema:
                yield Fault(path, "false", value, schema)
            return
        fields: dict[str, Json] = value if isinstance(value, dict) else {}
        known: dict[str, Json] = schema.get("properties", {})
        is_auto = value == "auto" and (takes_auto or "auto" in schema)
        for keyword, wanted in schema.items():
            holds = True
            if keyword == "type":
                holds = is_auto or any(_is_of(value, kind) for kind in _listed(wanted))
            elif keyword in _OF_TYPE:
                kind, is_held, _ = _OF_TYPE[keyword]
                holds = not _is_of(value, kind) or is_held(value, wanted)
            elif keyword == "properties":
                for key, item in fields.items():
                    if key in wanted:
                        yield from judge(wanted[key], item, (*path, key))
            elif keyword == "additionalProperties":
                others = ((key, item) for key, item in fields.items() if key not in known)
                if wanted is False:
                    for key, item in others:
                        yield Fault((*path, key), "unknown", item, schema)
                else:
                    for key, item in others:
                        yield from judge(wanted, item, (*path, key))
            elif keyword in ("enum", "const"):
                choices = wanted if keyword == "enum" else [wanted]
                if schema.get("ignoreCase") and isinstance(value, str):
                    choices = [value if str(each).lower() == value.lower() else each for each in choices]
                same = (each for each in choices if isinstance(each, bool) == isinstance(value, bool))
                holds = is_auto or value in same
            elif keyword in ("removed", "deprecated"):
                holds = False
            elif keyword == "items":
                for index, item in enumerate(value if isinstance(value, list) else ()):
                    yield from judge(wanted, item, (*path, index))
            elif keyword in (
                "required",
                "eventuallyRequired",
            ):  # the second, once the cluster has filled in its own
                for key in wanted if isinstance(value, dict) else ():
                    may_be_null = keyword == "required" and key in fields and fits(known.get(key, True), None)
                    if fields.get(key) is None and not may_be_null:
                        yield Fault((*path, key), "missing", None, schema)
            elif keyword in ("$ref", "optionalRef"):
                if keyword == "$ref" or value is not None:
                    yield from judge(named(wanted), value, path)
            elif keyword == "allOf":
                for each in wanted:
                    yield from judge(each, value, path)
            elif keyword == "anyOf":
                holds = any(fits(each, value) for each in wanted)
            elif keyword == "not":
                holds = not fits(wanted, value)
            elif keyword == "if":
                if fits(wanted, value):
                    yield from judge(schema.get("then", True), value, path)
            elif keyword == "union":
                items = [named(each["$ref"]) if "$ref" in each else each for each in wanted["items"]]
                yield from _of_union(items, value, path, judge)
            elif keyword == "checks":
                for message, check in wanted.items():
                    if "compareProperties" in check:  # it names the key by itself
                        yield from judge(check, value, path)
                    elif not fits(check, value):
                        yield Fault(path, "checks", value, schema, message)
            elif keyword == "disallowProperties":
                for key in wanted.keys() & fields.keys():
                    yield Fault((*path, key), "checks", fields[key], schema, wanted[key])
            elif keyword == "compareProperties":
                yield from _compared(wanted, fields, path, schema)
            if not holds:
                yield Fault(path, keyword, value, schema, wanted)

    said: dict[KeyPath, Fault] = {}
    for fault in judge(schema, value, path):
        held = said.get(fault.path)
        if held is None or _FIRST.get(held.keyword, 3) >= _FIRST.get(fault.keyword, 3):
            said[fault.path] = fault
    return said


def _is_of(value: Json, kind: str) -> bool:
    """Whether a value is of one of JSON Schema's types: 1.0 is an integer too; true is not."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    return kind not in ("number", "integer") and isinstance(value, KINDS[kind][0])


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def _of_union(items: list[Json], value: Json, path: KeyPath, judge: Judge) -> Iterator[Fault]:
    """Nothing where an item fits; else the faults of the item that was meant, or one of the whole union."""
    fields = value if isinstance(value, dict) else {}
    known = {key: sub for item in items for key, sub in item.get("properties", {}).items()}
    choices, meant, whole = list[tuple[str, Json]](), list[Fault](), {"properties": known}
    for item in items:
        properties = item.get("properties", {}).items()
        constants = [
            (key, sub["const"]) for key, sub in properties if isinstance(sub, dict) and "const" in sub
        ]
        choices += constants
        if any(fields.get(key) != const for key, const in constants):
            continue  # it requires the key and its value
        found = [*judge(item, value, path)]
        if not found:
            return
        # It is meant by its constants, or else by its type and the keys that it must have, and must not.
        here = {fault.keyword for fault in found if fault.path == path}
        below = {fault.keyword for fault in found if len(fault.path) == len(path) + 1}
        if (
            not meant
            and not here & {"type", "const", "not"}
            and (constants or not below & {"missing", "false"})
        ):
            meant = found
    texts = [item["const"] for item in items if "const" in item]
    unknown = [key for key in fields if key not in known]
    if meant:  # if it is not what it is read as, what is in it need not be either
        yield from [each for each in meant if each.keyword == "checks" and each.path == path] or meant
    elif isinstance(value, str) and texts:
        yield Fault(path, "choice", value, whole, texts)
    elif isinstance(value, dict) and choices:
        key, keyword = choices[0][0], "choice" if choices[0][0] in value else "missing"
        yield Fault((*path, key), keyword, value.get(key), whole, [text for _, text in choices])
    elif unknown:
        yield from (Fault((*path, key), "unknown", value[key], whole) for key in unknown)
    else:
        yield Fault(path, "union", value, whole)


def _compared(rule: dict[str, str], fields: dict[str, Json], path: KeyPath, schema: Json) -> Iterator[Fault]:
    kind = rule["type"]
    a: Json = fields.get(rule["a"])
    b: Json = fields.get(rule["b"])
    if kind != "a_is_subdir_of_b":
        if _is_of(a, "number") and _is_of(b, "number") and not (a < b or (a == b and kind == "a<=b")):
            yield Fault((*path, rule["b"]), "compared", b, schema, (kind, rule["a"], a))
    elif isinstance(a, str) and (b is None or isinstance(b, str)):
        # As the master has it: a relative path that does not climb, or a string with the parent for its prefix.
        # Go's filepath.Clean is normpath, but for two leading slashes, which become one.
        inner, parent = (re.sub("^//", "/", posixpath.normpath(text)) for text in (a, b or "/"))
        if not (inner.startswith(parent) if inner.startswith("/") else not inner.startswith("..")):
            yield Fault((*path, rule["a"]), "compared", a, schema, (kind, rule["b"], b))


def problem_of(
    document: Document, fault: Fault, fix: str = "", *, elsewhere: Mapping[str, str] | None = None
) -> Problem:
    """What a schema refuses at a place of a document, in the words that all schemas share.

    Args:
        document: What was judged.
        fault: By an ordinary keyword: of types, values, bounds, or a key that is unknown or missing.
        fix: What to write instead; the schema's own ``fix`` or the usual one if "".
        elsewhere: Key that is read in another place -> the fix.
    """
    path, keyword, schema, detail = fault.path, fault.keyword, fault.schema, fault.detail
    value, code = document.get(path, NOT_GIVEN), "invalid"
    if keyword == "unknown":
        gone = {"removed", "deprecated"}
        known = (key for key, each in schema["properties"].items() if not gone & each.keys())
        return unknown_key(document, path, known, elsewhere)
    if keyword == "missing":
        code, usual = "missing-key", f"write {path[-1]}: ..."
        message = f"{'is null' if value is None else 'missing'}: it is required"
    elif keyword in ("enum", "choice"):
        choices = [each for each in detail if each is not None]
        is_text = isinstance(value, str) or not any(isinstance(each, str) for each in choices)
        code, message = "out-of-range" if is_text else "wrong-type", "is not one of the allowed values"
        usual = one_of(map(str, choices), value)
    elif keyword in _OF_TYPE and (words := _OF_TYPE[keyword][2]):
        bound = words.format(f"{detail:g}" if detail < 1e6 else detail)
        code, message, usual = "out-of-range", f"must be {bound}", f"write {bound}"
    elif keyword == "minItems":
        message, usual = "is empty", "write something into it"
    elif keyword in ("minProperties", "maxProperties"):
        message, usual = f"must have one of {', '.join(schema['properties'])}", "write one of them"
    else:
        names = _listed(schema["type"])
        unsaid = ("null", "integer") if "number" in names else ("null",)
        kinds = [KINDS[name] for name in names if name not in unsaid]
        wanted = " or ".join(kind for _, kind in kinds) or "null"
        code, message = "wrong-type", f"must be {wanted}, not {kind_of(fault.value)}"
        usual = "remove it" if not kinds or fault.value is None else f"write {kinds[0][1]}"
    return document.problem(path, message, fix or schema.get("fix", usual), code, value=value)
