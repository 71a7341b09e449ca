"""YAML and JSON text -> Document, with the place of every key; and the words for the kinds of values.

YAML is read as Determined's master reads it, with Go's library. Its numbers differ from PyYAML's: ``1e-3`` and ``08``
are numbers there, ``1:30`` and a date are strings. Anchors, aliases and merges (``<<``) work; what they grow to is
bounded. In both formats a repeated key is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from determined_ds.documents.document import Document, KeyPath, Place, dotted, origin_at, refusal
from determined_ds.errors import ConfigError, Problem

MAX_DEPTH = 100
MAX_NODES = 100_000

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
# As Go's strconv.ParseInt with base 0, and yamlStyleFloat in go-yaml's resolve.go; both drop underscores.
# 08, not a valid octal, is a float to Go, and an integer again in the JSON that it writes.
_INT = r"[-+]?(?:0[bB][01_]+|0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|[0-9][0-9_]*)"
_FLOAT = r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
_NON_FINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe loader with the numbers of the master's parser, and no timestamps."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag in (_TAG + "bool", _TAG + "null", _MERGE)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes a string that either parser would take for something else: ``"1e-3"``, ``"08"``, ``"1:30"``."""


for _name, _regexp in (("int", _INT), ("float", f"{_FLOAT}|{_NON_FINITE}")):
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_regexp})$"), list("-+.0123456789"))


# ------------------------------------------------------------------------------------------- YAML


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text whose top level is a mapping.

    Raises:
        ConfigError: it does not parse, repeats a key, or grows without end; with the place.
    """
    reader = _NodeReader(name)
    if (node := _node_of(text, name)) is None:
        raise refusal(name, "is empty", "write an experiment configuration into it")
    if not isinstance(data := reader.read(node), dict):
        raise refusal(name, "is not a mapping of keys to values", "start it with `name: ...`")
    return Document(name=name, data=data, places=reader.places)


def parse_yaml_value(text: str, name: str) -> Any:
    """Parse one YAML value, e.g. the right-hand side of ``--set KEY=VALUE``.

    ``det`` reads that in Python before the master does, by YAML 1.2: ``010`` is ten there, and not eight.
    """
    node = _node_of(text, name)
    return None if node is None else _NodeReader(name, octal=False).read(node)


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML text that :func:`parse_yaml` reads back as ``data``, keys in their order."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _node_of(text: str, name: str) -> yaml.Node | None:
    try:
        depth = 0
        for each in yaml.parse(text, Loader=_Loader):  # flat: composing what is deep could exhaust the stack
            depth += isinstance(each, yaml.CollectionStartEvent) - isinstance(each, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                message, fix = f"nested deeper than {MAX_DEPTH} levels", "check that it is a configuration"
                raise refusal(name, message, fix, _place(each))
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        fix = "fix the YAML there: indent by spaces, not tabs; quote a value that begins with * or holds `: `"
        place = (min(mark.line, text.count("\n")) + 1, mark.column + 1)  # the end may be behind the last line
        raise refusal(name, f"is not YAML: {error.problem}", fix, place) from None
    except (yaml.YAMLError, UnicodeEncodeError) as error:
        raise refusal(name, f"is not text: {error}", "save it as UTF-8 text") from None


def _place(node: Any) -> Place:
    """Where a node or an event begins."""
    return node.start_mark.line + 1, node.start_mark.column + 1


def _place_of(text: str, at: int) -> Place:
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


class _NodeReader:
    """Turns composed nodes into plain data, noting each key's place and refusing repeated keys."""

    def __init__(self, name: str, *, octal: bool = True) -> None:
        self.name = name
        self.octal = octal
        self.places: dict[KeyPath, Place] = {}
        self._repeated: list[Problem] = []
        self._num_nodes = 0

    def read(self, node: yaml.Node) -> Any:
        """The data of the top node, each key once."""
        data = self._value(node, ())
        if self._repeated:
            raise ConfigError(self._repeated)
        return data

    def _refused(self, node: yaml.Node, message: str, fix: str) -> ConfigError:
        return refusal(self.name, message, fix, _place(node))

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels, or over {MAX_NODES} values"
            raise self._refused(node, message, "check for an anchor that is nested in itself")
        self.places.setdefault(path, _place(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            self._merge(node, path)
            self.places |= {(*path, key.value): _place(key) for key, _ in node.value}
            return {key.value: self._value(item, (*path, key.value)) for key, item in node.value}
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self._value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _merge(self, node: yaml.MappingNode, path: KeyPath) -> None:
        """Put what ``<<`` merges into a mapping before its own keys, and leave each key once."""
        first: dict[str, Place] = {}
        for key, _ in node.value:
            place = _place(key)
            if (
                isinstance(key, yaml.ScalarNode)
                and (before := first.setdefault(key.value, place)) is not place
            ):
                message, fix = f"given twice, on lines {before[0]} and {place[0]}", "keep one of them"
                at, name = origin_at(self.name, place), dotted((*path, key.value))
                problem = Problem(key=name, message=message, origin=at, fix=fix, code="duplicate-key")
                self._repeated.append(problem)
        try:
            yaml.constructor.SafeConstructor().flatten_mapping(node)
        except yaml.YAMLError:
            fix = "write <<: *anchor, or <<: [*one, *other]"
            raise self._refused(node, "<< merges mappings only", fix) from None
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._refused(key, "a key must be a plain word", "write `key: value`")
        node.value = [*{key.value: (key, item) for key, item in node.value}.values()]

    def _scalar(self, node: yaml.Node) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind in ("str", "value", "merge"):  # `=` and `<<` mean nothing here
            return text
        if kind == "null":
            return None
        if kind not in ("bool", "int", "float"):
            message = f"the tag {node.tag!r} means nothing here"
            raise self._refused(node, message, "write a plain value, without !")
        plain = text.replace("_", "").lower()
        try:
            if kind == "bool":
                return yaml.constructor.SafeConstructor.bool_values[plain]
            if kind == "float":
                real = float(plain.replace(".inf", "inf").replace(".nan", "nan"))
                if not math.isfinite(real):
                    raise self._refused(node, f"{text} is not a finite number", "write a finite number")
                return real
            base = 0 if plain.lstrip("+-")[:2] in ("0b", "0o", "0x") else 10
            if self.octal and re.fullmatch("[-+]?0[0-7]+", plain):
                base = 8
            return int(plain, base)
        except (KeyError, ValueError):
            raise self._refused(node, f"{text!r} is not a valid {kind}", "write a plain value") from None


# ------------------------------------------------------------------------------------------- JSON


def parse_json(text: str, name: str) -> Document:
    """Parse JSON text whose top level is an object.

    Raises:
        ConfigError: it does not parse, or repeats a key; with the place.
    """
    if not text.strip():
        raise refusal(name, "is empty", "write a JSON object into it, at least {}")

    def refuse(word: str) -> None:
        message, place = f"{word} is not a finite number", _place_of(text, text.index(word))
        raise refusal(name, message, "write a finite number", place)

    try:  # judges validity, so that messages for broken text are the usual ones
        data = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        fix = "fix the JSON there: no comments, no comma before a bracket; true, false and null in lower case"
        raise refusal(name, f"is not JSON: {error.msg}", fix, _place_of(text, error.pos)) from None
    except (RecursionError, ValueError) as error:  # a ValueError: an integer of more than 4300 digits
        raise refusal(name, f"is not JSON: {error}", "check that it is a configuration") from None
    if not isinstance(data, dict):
        raise refusal(name, "is not a JSON object", 'start it with "{"')

    reader = _NodeReader(name)
    try:  # JSON is YAML too, and says so where its keys are
        node: Any = yaml.compose(text, Loader=_Loader)
        reader.read(node)
    except yaml.YAMLError:  # but for escaped surrogates, and keys of a thousand characters
        reader.places.clear()
    return Document(name=name, data=data, places=reader.places)


# ------------------------------------------------------------------------------------------- values

# JSON Schema's name of a type -> Python's, and words for a value of it.
KINDS: dict[str, tuple[type, str]] = {
    "string": (str, "a string"),
    "integer": (int, "an integer"),
    "boolean": (bool, "true or false"),
    "object": (dict, "a mapping"),
    "array": (list, "a list"),
    "number": (float, "a number"),
    "null": (type(None), "null"),
}


def kind_of(value: Any) -> str:
    """What a YAML value is, in words: ``a string``, ``an integer``, ``null`` ..."""
    kind = type(value)
    return next((words for each, words in KINDS.values() if each is kind), kind.__name__)


def as_plain(data: Any) -> Any:
    """A deep copy in the types that JSON has: mappings are dicts, tuples lists (attrdict makes them), paths strings."""
    if isinstance(data, Mapping):
        return {str(key): as_plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [as_plain(value) for value in data]
    return str(data) if isinstance(data, os.PathLike) else data
