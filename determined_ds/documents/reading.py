"""YAML and JSON files -> Document. Duplicate keys are refused, and every key's place is kept."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from determined_ds.documents.document import Document, KeyPath, Place, refusal, repeated
from determined_ds.documents.yaml_text import (
    MAX_BITS,
    MAX_DEPTH,
    MAX_NODES,
    dump_yaml,
    parse_yaml,
    parse_yaml_value,
)
from determined_ds.errors import ConfigError, Problem

__all__ = ["dump_yaml", "parse_json", "parse_yaml", "parse_yaml_value", "read_json", "read_yaml"]

MAX_BYTES = 4 * 2**20
DEPTH_SHOWN = 2  # folders below that are searched for the intended file
ENOUGH_SHOWN = 4  # files, beyond which no deeper folder is searched
MAX_LOOKED_AT = 2_000


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
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise refusal(name, "is a folder, not a file", _siblings(path / "x"))
        if not stat.S_ISREG(found.st_mode):
            raise refusal(name, "is a device or a pipe, not a file", "save the configuration in a file")
        if found.st_size > MAX_BYTES:
            message = f"larger than {MAX_BYTES // 2**20} MiB: not a configuration"
            raise refusal(name, message, "check that it is the intended file")
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        fix = "save the configuration in a file: stdin is not read" if name == "-" else _siblings(path)
        raise refusal(name, "no such file", fix) from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start]
        place = Place(before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
        raise refusal(name, f"is not UTF-8 text (byte {error.start})", "save it as UTF-8", place) from None
    except OSError as error:
        raise refusal(name, f"cannot be read: {error.strerror}", "check its path and permissions") from None
    except ValueError as error:  # a path with a null byte in it
        raise refusal(name, f"cannot be read: {error}", "check its path") from None
    return parse(text, name)


def _siblings(path: Path) -> str:
    """A fix for a missing file: what there is in the nearest folder that exists, and in the folders below it."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    names: list[str] = []
    for depth in range(1 + DEPTH_SHOWN):
        if len(names) < ENOUGH_SHOWN:
            names += _configurations(folder, "*/" * depth)
    if not names:
        return "check the path"
    return f"in {folder} there {'are' if len(names) > 1 else 'is'}: {', '.join(names[:12])}"


def _configurations(folder: Path, between: str) -> list[str]:
    """YAMLs and JSONs that many folders below one, without hidden ones; of at most ``MAX_LOOKED_AT`` files."""
    found = []
    try:
        for at in itertools.islice(folder.glob(f"{between}*"), MAX_LOOKED_AT):
            name = at.relative_to(folder)
            if at.suffix in {".yaml", ".yml", ".json"} and not any(
                part.startswith(".") for part in name.parts
            ):
                found.append(str(name))
    except OSError:
        pass
    return sorted(found)


def parse_json(text: str, name: str) -> Document:
    """Parse JSON text whose top level is an object. See :func:`read_json`."""
    reader = _JSONReader(text, name)
    data = reader.read()
    if not isinstance(data, dict):
        raise refusal(name, "is not a JSON object", 'start it with "{"')
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
        self._num_nodes = 0
        self._scan = json.JSONDecoder().raw_decode
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def read(self) -> Any:
        if not self.text.strip():
            raise refusal(self.name, "is empty", "write a JSON object into it, at least {}")
        try:
            json.loads(self.text)
        except json.JSONDecodeError as error:
            fix, at = _json_fix(self.text, error)
            raise refusal(self.name, f"is not JSON: {error.msg}", fix, self._place(at)) from None
        except RecursionError:
            raise self._too_deep(None) from None
        except ValueError as error:  # an integer of more than 4300 digits
            place = self._place(self._longest_number())
            raise refusal(self.name, f"is not JSON: {error}", "write a smaller number", place) from None
        return self._value(self._skip(0), ())[0]

    def _too_deep(self, place: Place | None) -> ConfigError:
        message = f"nested deeper than {MAX_DEPTH} levels"
        return refusal(self.name, message, "check that it is a configuration", place)

    def _longest_number(self) -> int:
        numbers = re.finditer("[0-9]+", self.text)
        return max(numbers, key=lambda match: match.end() - match.start()).start()

    def _skip(self, at: int) -> int:
        match = self._SPACE.match(self.text, at)
        assert match is not None
        return match.end()

    def _place(self, at: int) -> Place:
        line = bisect.bisect_right(self._line_starts, at)
        return Place(line, at - self._line_starts[line - 1] + 1)

    def _value(self, at: int, path: KeyPath) -> tuple[Any, int]:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            fix = "check that it is a configuration"
            raise refusal(self.name, f"over {MAX_NODES} values", fix, self._place(at))
        if len(path) > MAX_DEPTH:
            raise self._too_deep(self._place(at))
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
        return self._scalar(at)

    def _scalar(self, at: int) -> tuple[Any, int]:
        value, end = self._scan(self.text, at)
        if isinstance(value, float) and not math.isfinite(value):  # NaN, Infinity, 1e999
            word = self.text[at:end]
            message = (
                f"{word} is not JSON"
                if word.isalpha() or word[1:].isalpha()
                else f"{word} is not a finite number"
            )
            raise refusal(self.name, message, "write a finite number", self._place(at))
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            message = f"an integer of more than {MAX_BITS} bits"
            raise refusal(self.name, message, "write a smaller number", self._place(at))
        return value, end

    def _object(self, at: int, path: KeyPath) -> tuple[dict[str, Any], int]:
        result: dict[str, Any] = {}
        at = self._skip(at + 1)
        while self.text[at] != "}":
            place = self._place(at)
            key, at = json.decoder.scanstring(self.text, at + 1)  # type: ignore[attr-defined]
            inner = (*path, key)
            if key in result:
                self.problems.append(repeated(self.name, inner, self.places[inner], place))
            self.places.setdefault(inner, place)
            at = self._skip(self._skip(at) + 1)  # over the colon
            result[key], at = self._value(at, inner)
            at = self._skip(at)
            if self.text[at] == ",":
                at = self._skip(at + 1)
        return result, at + 1


def _json_fix(text: str, error: json.JSONDecodeError) -> tuple[str, int]:
    """What to do about text that is not JSON, and where."""
    before, rest = text[: error.pos].rstrip(), text[error.pos :]
    # Python 3.13 points at the comma itself, older ones behind it.
    if before.endswith(",") and rest[:1] in ("}", "]"):
        return "remove the comma before the bracket", len(before) - 1
    if re.match(r",\s*[}\]]", rest):
        return "remove the comma before the bracket", error.pos
    if re.match(r"//|#|/\*", rest):
        return "JSON has no comments: remove it", error.pos
    word = re.match(r"True|False|None", rest)
    if word:
        return f"write {word.group().lower().replace('none', 'null')}", error.pos
    return "use double quotes" if rest.startswith("'") else "fix the JSON there", error.pos
