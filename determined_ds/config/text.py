"""YAML and JSON text -> Document. Duplicate keys are refused, and every key's place is kept.

YAML is read as Determined's master reads it, which parses with Go's library: ``1e-3`` is a number there,
while PyYAML alone would make it a string.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from determined_ds.config.document import Document, KeyPath, Place, dotted
from determined_ds.errors import ConfigError, Problem

MAX_BYTES = 4 * 2**20
MAX_DEPTH = 100
MAX_NODES = 200_000


def read_yaml(path: Path, *, name: str | None = None) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: the file is missing, is not UTF-8, does not parse, or repeats a key.
    """
    return _read(path, name, parse_yaml)


def read_json(path: Path, *, name: str | None = None) -> Document:
    """Read a JSON file whose top level is an object.

    Raises:
        ConfigError: the file is missing, is not UTF-8, does not parse, or repeats a key.
    """
    return _read(path, name, parse_json)


def _read(path: Path, name: str | None, parse: Callable[[str, str], Document]) -> Document:
    name = name or str(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _refusal(name, f"larger than {MAX_BYTES // 2**20} MiB: not a configuration")
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise _refusal(name, "no such file", _siblings(path)) from None
    except IsADirectoryError:
        raise _refusal(name, "is a folder, not a file", _siblings(path / "x")) from None
    except UnicodeDecodeError as error:
        raise _refusal(name, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8") from None
    except OSError as error:
        raise _refusal(name, f"cannot be read: {error.strerror}", "check its path and permissions") from None
    return parse(text, name)


def _siblings(path: Path) -> str:
    """A mend for a missing file: what there is in the nearest folder that exists."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        names = sorted(p.name for p in folder.iterdir() if p.suffix in {".yaml", ".yml", ".json"})
    except OSError:
        names = []
    return f"in {folder} there are: {', '.join(names[:12])}" if names else "check the path"


def _refusal(name: str, message: str, mend: str = "", place: Place | None = None) -> ConfigError:
    where = f"{name}:{place.line}:{place.column}" if place else name
    return ConfigError(Problem(key=where, message=message, mend=mend, code="unreadable"))


# ---------------------------------------------------------------------------------------------- YAML


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML's safe loader with the number syntax of the master's parser, and no timestamps."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, name: str) -> Document:
    """Parse YAML text whose top level is a mapping. See :func:`read_yaml`."""
    node = _compose(text, name)
    if node is None:
        raise _refusal(name, "is empty", "write an experiment configuration into it")
    reader = _NodeReader(name)
    data = reader.value(node, ())
    if not isinstance(data, dict):
        raise _refusal(name, "is not a mapping of keys to values", "start it with `name: ...`")
    return Document(name=name, data=data, places=reader.places)


def parse_yaml_value(text: str, name: str) -> Any:
    """Parse one YAML value, e.g. the right-hand side of ``--set KEY=VALUE``."""
    node = _compose(text, name)
    return None if node is None else _NodeReader(name).value(node, ())


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):  # flat, so that depth cannot overflow the stack
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1
                raise _refusal(name, f"nested deeper than {MAX_DEPTH} levels", place=Place(line, 1))
        node: yaml.Node | None = yaml.compose(text, Loader=_Loader)
        return node
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = Place(mark.line + 1, mark.column + 1) if mark else None
        problem = getattr(error, "problem", None) or str(error)
        mend = "indent with spaces" if "\\t" in problem else "mend the YAML there"
        raise _refusal(name, f"is not YAML: {problem}", mend, place) from None


class _NodeReader:
    """Turns composed nodes into plain data, noting each key's place and refusing repeated keys."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places: dict[KeyPath, Place] = {}
        self.num_nodes = 0
        self.constructor = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.num_nodes += 1
        place = Place(node.start_mark.line + 1, node.start_mark.column + 1)
        if self.num_nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise _refusal(self.name, "grows without end", "do not nest YAML anchors in themselves", place)
        self.places.setdefault(path, place)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        try:
            return self.constructor.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            problem = getattr(error, "problem", None) or str(error)
            raise _refusal(self.name, problem, "write a plain value", place) from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        written = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        self._refuse_repeats(written, path)
        try:
            self.constructor.flatten_mapping(node)
        except yaml.YAMLError as error:
            place = Place(node.start_mark.line + 1, node.start_mark.column + 1)
            problem = getattr(error, "problem", None) or str(error)
            raise _refusal(self.name, problem, "merge only mappings with <<", place) from None
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = Place(key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal(self.name, "a key must be a plain word", "write `key: value`", place)
            key = key_node.value
            # A merged key (<<) stands before the written ones, which win over it.
            self.places[(*path, key)] = place
            result[key] = self.value(value_node, (*path, key))
        return result

    def _refuse_repeats(self, keys: list[yaml.Node], path: KeyPath) -> None:
        seen: dict[str, Place] = {}
        problems = []
        for key in keys:
            place = Place(key.start_mark.line + 1, key.start_mark.column + 1)
            word = str(key.value)
            if word in seen:
                problems.append(_repeated(self.name, (*path, word), seen[word], place))
            seen.setdefault(word, place)
        if problems:
            raise ConfigError(problems)


def _repeated(name: str, path: KeyPath, first: Place, again: Place) -> Problem:
    return Problem(
        key=dotted(path),
        message=f"given twice, on lines {first.line} and {again.line}",
        origin=f"{name}:{again.line}",
        mend="keep one of them",
        code="duplicate-key",
    )


# ---------------------------------------------------------------------------------------------- JSON


def parse_json(text: str, name: str) -> Document:
    """Parse JSON text whose top level is an object. See :func:`read_json`."""
    reader = _JSONReader(text, name)
    data = reader.read()
    if not isinstance(data, dict):
        raise _refusal(name, "is not a JSON object", 'start it with "{"')
    if reader.problems:
        raise ConfigError(reader.problems)
    return Document(name=name, data=data, places=reader.places)


class _JSONReader:
    """A recursive-descent reader over the standard library's own scanners, that keeps places.

    ``json.loads`` judges validity first, so that messages for broken text are the usual ones.
    """

    _SPACE = re.compile(r"[ \t\n\r]*")

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.places: dict[KeyPath, Place] = {}
        self.problems: list[Problem] = []
        self._scan = json.JSONDecoder(parse_constant=self._refuse_constant).raw_decode
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def read(self) -> Any:
        try:
            json.loads(self.text, parse_constant=self._refuse_constant)
        except json.JSONDecodeError as error:
            mend = _json_mend(self.text, error)
            place = Place(error.lineno, error.colno)
            raise _refusal(self.name, f"is not JSON: {error.msg}", mend, place) from None
        except RecursionError:
            raise _refusal(self.name, "nested too deeply") from None
        except ValueError as error:  # an integer of more than 4300 digits
            raise _refusal(self.name, f"is not JSON: {error}", "write a smaller number") from None
        return self._value(self._skip(0), ())[0]

    def _refuse_constant(self, word: str) -> Any:
        raise _refusal(self.name, f"{word} is not JSON", "write a finite number")

    def _skip(self, at: int) -> int:
        match = self._SPACE.match(self.text, at)
        assert match is not None
        return match.end()

    def _place(self, at: int) -> Place:
        line = bisect.bisect_right(self._line_starts, at)
        return Place(line, at - self._line_starts[line - 1] + 1)

    def _value(self, at: int, path: KeyPath) -> tuple[Any, int]:
        if len(path) > MAX_DEPTH:
            raise _refusal(self.name, f"nested deeper than {MAX_DEPTH} levels", place=self._place(at))
        if self.text[at] == "{":
            return self._object(at, path)
        if self.text[at] == "[":
            items: list[Any] = []
            at = self._skip(at + 1)
            while self.text[at] != "]":
                item, at = self._value(at, (*path, len(items)))
                items.append(item)
                at = self._skip(at)
                if self.text[at] == ",":
                    at = self._skip(at + 1)
            return items, at + 1
        value, end = self._scan(self.text, at)
        return value, end

    def _object(self, at: int, path: KeyPath) -> tuple[dict[str, Any], int]:
        result: dict[str, Any] = {}
        at = self._skip(at + 1)
        while self.text[at] != "}":
            place = self._place(at)
            key, at = json.decoder.scanstring(self.text, at + 1)  # type: ignore[attr-defined]
            if key in result:
                first = self.places[(*path, key)]
                self.problems.append(_repeated(self.name, (*path, key), first, place))
            self.places.setdefault((*path, key), place)
            at = self._skip(self._skip(at) + 1)  # over the colon
            result[key], at = self._value(at, (*path, key))
            at = self._skip(at)
            if self.text[at] == ",":
                at = self._skip(at + 1)
        return result, at + 1


def _json_mend(text: str, error: json.JSONDecodeError) -> str:
    before = text[: error.pos].rstrip()
    if before.endswith(",") and text[error.pos : error.pos + 1] in "}]":
        return "remove the comma before it"
    if re.match(r"(//|#|/\*)", text[error.pos :]):
        return "JSON has no comments: remove it"
    return "mend the JSON there"
