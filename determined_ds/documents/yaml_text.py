"""YAML text -> Document, as Determined's master reads it: with Go's library.

Its numbers differ from PyYAML's: ``1e-3`` and ``08`` are numbers there, ``1:30`` and a date are strings.
Anchors, aliases and merges (``<<``) work; what they grow to is bounded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import yaml

from determined_ds.documents.document import Document, KeyPath, Place, refusal, repeated
from determined_ds.errors import ConfigError

MAX_DEPTH = 100
MAX_NODES = 100_000
MAX_BITS = 64

_PREFIX = "tag:yaml.org,2002:"
_MERGE = _PREFIX + "merge"
# As Go's strconv.ParseInt with base 0, and yamlStyleFloat in go-yaml's resolve.go; both drop underscores.
# 08, not a valid octal, is a float to Go, and an integer again in the JSON that it writes.
_INT = r"[-+]?(?:0[bB][01_]+|0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|[0-9][0-9_]*)"
_FLOAT = r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?"
_NON_FINITE = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_NON_PRINTABLE = re.compile("[^\x09\x0a\x0d\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Pairs = list[tuple[yaml.ScalarNode, yaml.Node]]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe loader with the numbers of the master's parser, and no timestamps."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag in (_PREFIX + "bool", _PREFIX + "null", _MERGE)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes a string that either parser would take for something else: ``"1e-3"``, ``"08"``, ``"1:30"``."""


for _name, _regexp in (("int", _INT), ("float", f"{_FLOAT}|{_NON_FINITE}")):
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(_PREFIX + _name, re.compile(f"^(?:{_regexp})$"), list("-+.0123456789"))


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text whose top level is a mapping.

    Raises:
        ConfigError: it does not parse, repeats a key, or grows without end; with the place.
    """
    node = _compose(text, name)
    if node is None:
        raise refusal(name, "is empty", "write an experiment configuration into it")
    reader = _NodeReader(name)
    data = reader.value(node, ())
    if not isinstance(data, dict):
        raise refusal(name, "is not a mapping of keys to values", "start it with `name: ...`")
    return Document(name=name, data=data, places=reader.places)


def parse_yaml_value(text: str, name: str) -> Any:
    """Parse one YAML value, e.g. the right-hand side of ``--set KEY=VALUE``.

    ``det`` reads that in Python before the master does, by YAML 1.2: ``010`` is ten there, and not eight.
    """
    node = _compose(text, name)
    return None if node is None else _NodeReader(name, octal=False).value(node, ())


def dump_yaml(data: Mapping[str, Any]) -> str:
    """YAML text that :func:`parse_yaml` reads back as ``data``, keys in their order."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _compose(text: str, name: str) -> yaml.Node | None:
    unprintable = _NON_PRINTABLE.search(text, 1 if text.startswith("\ufeff") else 0)
    if unprintable:
        before = text[: unprintable.start()]
        place = Place(before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = f"is not text: it holds the character U+{ord(unprintable.group()):04X}"
        raise refusal(name, message, "remove it, and save the file as UTF-8 text", place)
    try:
        depth = 0
        # Events are flat, so that neither depth nor size is a problem before it is known to be small.
        for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or count > MAX_NODES:
                much = (
                    f"nested deeper than {MAX_DEPTH} levels"
                    if depth > MAX_DEPTH
                    else f"over {MAX_NODES} values"
                )
                raise refusal(name, much, "check that it is a configuration", _place(event))
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.YAMLError as error:
        raise _not_yaml(text, name, error) from None


def _not_yaml(text: str, name: str, error: yaml.YAMLError) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    if mark is None:
        return refusal(name, f"is not YAML: {problem}", "fix the YAML")
    place = Place(
        min(mark.line, text.count("\n")) + 1, mark.column + 1
    )  # the end may be behind the last line
    if problem == "second occurrence":
        return refusal(
            name, "is not YAML: the anchor is defined twice", "give the second another name", place
        )
    begin = getattr(error, "context_mark", None)
    if begin is not None and begin.line != mark.line:
        problem += f", in what begins on line {begin.line + 1}"
    fix = "fix the YAML there"
    lines = text.split("\n")
    before = lines[mark.line][: mark.column + 1] if mark.line < len(lines) else ""
    if before.endswith("\t") or ("\t" in before and before[:-1].isspace()):
        fix = "indent with spaces, not tabs"
    elif "another document" in problem:
        fix = "keep one document: remove the `---`"
    elif "undefined alias" in problem:
        fix = "define the anchor (&name) before it is used, or put the value in quotes"
    elif "mapping values are not allowed" in problem:
        fix = "put a value that holds `: ` in quotes, or fix the indentation"
    return refusal(name, f"is not YAML: {problem}", fix, place)


def _place(node: Any) -> Place:
    """Where a node or an event begins."""
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


class _NodeReader:
    """Turns composed nodes into plain data, noting each key's place and refusing repeated keys."""

    def __init__(self, name: str, *, octal: bool = True) -> None:
        self.name = name
        self.octal = octal
        self.places: dict[KeyPath, Place] = {}
        self._num_nodes = 0
        self._pairs: dict[int, Pairs] = {}  # of each mapping node by its id, merges done

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._grow(1, node, len(path))
        self.places.setdefault(path, _place(node))
        if not isinstance(node, yaml.ScalarNode) and node.tag not in (_PREFIX + "map", _PREFIX + "seq"):
            raise self._meaningless(node)
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key, value in self._merged(node, path, 0):
                inner = (*path, key.value)
                self.places[inner] = _place(key)
                result[key.value] = self.value(value, inner)
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _grow(self, num_nodes: int, node: yaml.Node, depth: int) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            message = "grows without end, by anchors that hold each other"
            raise refusal(self.name, message, "do not nest YAML anchors in themselves", _place(node))

    def _merged(self, node: yaml.MappingNode, path: KeyPath, depth: int) -> Pairs:
        """The pairs of a mapping: those that ``<<`` merges first, unless it gives them itself."""
        if id(node) in self._pairs:
            return self._pairs[id(node)]
        self._grow(0, node, depth)
        own: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        first: dict[str, Place] = {}
        merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        problems = []
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise refusal(self.name, "a key must be a plain word", "write `key: value`", _place(key))
            if key.value in first:
                fix = "merge several by <<: [*a, *b]" if key.tag == _MERGE else "keep one of them"
                again = (*path, key.value)
                problems.append(repeated(self.name, again, first[key.value], _place(key), fix))
            first.setdefault(key.value, _place(key))
            if key.tag != _MERGE:
                own[key.value] = (key, value)
                continue
            for source in self._sources(value):
                for pair in self._merged(source, path, depth + 1):
                    merged.setdefault(pair[0].value, pair)
        if problems:
            raise ConfigError(problems)
        pairs = list({**merged, **own}.values())
        self._grow(len(merged), node, depth)
        self._pairs[id(node)] = pairs
        return pairs

    def _sources(self, node: yaml.Node) -> list[yaml.MappingNode]:
        """The mappings that ``<<`` merges; the first that gives a key wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, yaml.MappingNode):
                fix = "write <<: *anchor, or <<: [*one, *other]"
                raise refusal(self.name, "<< merges mappings only", fix, _place(source))
        return list(sources)

    def _scalar(self, node: yaml.Node) -> Any:
        kind = node.tag.removeprefix(_PREFIX)
        text: str = node.value
        try:
            if kind in ("str", "value", "merge"):  # `=` and `<<` mean nothing here
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return yaml.constructor.SafeConstructor.bool_values[text.lower()]
            if kind == "int":
                return self._int(text, node)
            if kind == "float":
                number = float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
                if not math.isfinite(number):
                    raise refusal(
                        self.name, f"{text} is not a finite number", "write a finite number", _place(node)
                    )
                return number
        except (KeyError, ValueError):
            raise refusal(
                self.name, f"{text!r} is not a valid {kind}", "write a plain value", _place(node)
            ) from None
        raise self._meaningless(node)

    def _meaningless(self, node: yaml.Node) -> ConfigError:
        message = f"the tag {node.tag!r} means nothing here"
        return refusal(self.name, message, "write a plain value, without !", _place(node))

    def _int(self, text: str, node: yaml.Node) -> int:
        plain = text.replace("_", "").lower()
        sign = -1 if plain.startswith("-") else 1
        digits = plain.lstrip("+-")
        base = {"0b": 2, "0o": 8, "0x": 16}.get(digits[:2], 10)
        if base == 10 and self.octal and re.fullmatch("0[0-7]+", digits):
            base = 8
        if len(digits) <= MAX_BITS + 2:
            number = sign * int(digits, base)
            if number.bit_length() <= MAX_BITS:
                return number
        message = f"an integer of more than {MAX_BITS} bits"
        raise refusal(self.name, message, "write a smaller number", _place(node))
