"""A DeepSpeed JSON -> Document: found inside the context directory, every key known, every type right.

DeepSpeed ignores an unknown key at the top level in silence. The keys it does read are data,
``deepspeed_keys.json``, generated from the installed DeepSpeed by ``tests/config/generate_deepspeed_keys.py``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from determined_ds.config.document import Document, KeyPath, unknown_key
from determined_ds.config.experiment import kind_of, type_mend
from determined_ds.config.text import read_json
from determined_ds.errors import ConfigError, Problem

AUTO = "auto"
EMBEDDED = "hyperparameters.deepspeed_config"


@functools.cache
def known_keys() -> dict[str, Any]:
    """The tree of keys that the installed DeepSpeed reads. See the generator for its form."""
    text = Path(__file__).with_name("deepspeed_keys.json").read_text()
    tree: dict[str, Any] = json.loads(text)
    return tree


def load_deepspeed_config(
    value: str | dict[str, Any] | None, *, context_dir: Path, hyperparameters: Document
) -> Document:
    """The DeepSpeed JSON that ``hyperparameters.deepspeed_config`` names or holds.

    Args:
        value: A path relative to the context directory, the mapping itself, or None for an empty one.
        context_dir: The directory that Determined sends to the cluster.
        hyperparameters: Where ``value`` was written, for messages.

    Raises:
        ConfigError: the path leaves the context directory, or the file cannot be read.
    """
    if value is None:
        return Document(name="no deepspeed_config", data={})
    if isinstance(value, dict):
        inner: KeyPath = ("deepspeed_config",)
        wrapped = hyperparameters.get((*inner, "val")) is value
        if wrapped:  # {type: const, val: {...}}
            inner = (*inner, "val")
        if hyperparameters.get(inner) is value:
            sub = hyperparameters.sub(inner)
            return Document(name=sub.name, data=value, places=sub.places, overwrites=sub.overwrites)
        return Document(name=EMBEDDED, data=value)
    problem = _path_problem(value, context_dir, hyperparameters)
    if problem:
        raise ConfigError(problem)
    return read_json(context_dir / value, name=value)


def _path_problem(value: str, context_dir: Path, hyperparameters: Document) -> Problem | None:
    root = context_dir.resolve()
    target = (root / value).resolve()
    if target.is_relative_to(root):
        if target.is_file():
            return None
        message = "no such file in the context directory" if not target.exists() else "is not a file"
        folder = next((p for p in target.parents if p.is_dir() and p.is_relative_to(root)), root)
        names = sorted(str(p.relative_to(root)) for p in folder.glob("*.json"))
        mend = f"there are: {', '.join(names[:12])}" if names else "give a path relative to the context directory"
    else:
        message = "lies outside the context directory, so a cluster would not get it"
        mend = "move it inside, and give its path relative to the context directory"
    return Problem(
        key=EMBEDDED,
        value=value,
        origin=hyperparameters.origin(("deepspeed_config",)),
        message=message,
        mend=mend,
        code="deepspeed-config-path",
    )


def key_problems(document: Document) -> list[Problem]:
    """Every key of a DeepSpeed JSON that the installed DeepSpeed does not read, or reads as another type."""
    return list(_walk(document, (), known_keys()))


def _walk(document: Document, path: KeyPath, node: dict[str, Any]) -> Iterator[Problem]:
    known: dict[str, Any] = node.get("keys", {})
    section = document.get(path) if path else document.data
    for key, value in section.items():
        here = (*path, key)
        child = known.get(key)
        if child is None:
            if not node.get("free"):
                yield unknown_key(document, here, (k for k, v in known.items() if "removed" not in v))
        elif "removed" in child:
            yield _problem(document, here, str(child["removed"]), "remove it", "removed-key")
        elif value != AUTO:
            yield from _value(document, here, value, child)


def _value(document: Document, path: KeyPath, value: Any, node: dict[str, Any]) -> Iterator[Problem]:
    types = node.get("types")
    if types and not any(_is(value, name) for name in types):
        named = [name for name in types if name != "null"]
        wanted = " or ".join(_WORDS[name] for name in named)
        mend = type_mend(_KINDS[named[0]], value)
        yield _problem(document, path, f"must be {wanted}, not {kind_of(value)}", mend, "wrong-type")
    elif "enum" in node and not _among(value, node):
        allowed = ", ".join(json.dumps(item) for item in node["enum"])
        yield _problem(document, path, "is not one of the values DeepSpeed knows", f"use {allowed}", "out-of-range")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        bound = _bound_broken(value, node)
        if bound:
            yield _problem(document, path, f"must be {bound}", f"write a value {bound}", "out-of-range")
    if isinstance(value, dict) and "keys" in node:
        yield from _walk(document, path, node)


def _among(value: Any, node: dict[str, Any]) -> bool:
    if node.get("ignore_case") and isinstance(value, str):
        return value.lower() in [item.lower() for item in node["enum"] if isinstance(item, str)]
    return value in node["enum"]


def _bound_broken(value: float, node: dict[str, Any]) -> str | None:
    tests = {
        "minimum": (lambda bound: value >= bound, "at least"),
        "maximum": (lambda bound: value <= bound, "at most"),
        "minimum_exclusive": (lambda bound: value > bound, "above"),
        "maximum_exclusive": (lambda bound: value < bound, "below"),
    }
    for name, (holds, words) in tests.items():
        if name in node and not holds(node[name]):
            return f"{words} {node[name]}"
    return None


_WORDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "null",
}
_KINDS: dict[str, type] = {
    "integer": int,
    "number": float,
    "string": str,
    "boolean": bool,
    "object": dict,
    "array": list,
}


def _is(value: Any, name: str) -> bool:
    if name == "null":
        return value is None
    if name == "integer":  # 5e8 in JSON is a float that DeepSpeed takes for an integer
        whole = isinstance(value, float) and value.is_integer()
        return (isinstance(value, int) and not isinstance(value, bool)) or whole
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, _KINDS[name])


def _problem(document: Document, path: KeyPath, message: str, mend: str, code: str) -> Problem:
    return Problem(
        key=document.key(path),
        value=document.get(path),
        origin=document.origin(path),
        message=message,
        mend=mend,
        code=code,
    )
