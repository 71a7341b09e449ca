"""What several files here ask: the problems of a decision, its values by dotted keys, the keys that DeepSpeed knows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from determined_ds import ConfigError, Problem, ResolvedConfig
from tests.package import ROOT, decide

KEYS = ROOT / "determined_ds" / "config" / "deepspeed_keys.json"
AUTO = "auto"
Node = dict[str, Any]


def told(
    hp: str | Mapping[str, Any] = "global_batch_size: 8", ds: str | Mapping[str, Any] = "{}", **how: Any
) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings of a decision, whichever way it ends."""
    try:
        return [], list(decide(hp, ds, **how).warnings)
    except ConfigError as error:
        return list(error.problems), list(error.warnings)


def value(resolved: ResolvedConfig, key: str) -> Any:
    """What DeepSpeed is given at a dotted key; None where there is nothing."""
    found: Any = resolved.ds_config
    for step in key.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def nested(key: str, value: Any) -> dict[str, Any]:
    """A mapping with one value, at a dotted key."""
    for step in reversed(key.split(".")):
        value = {step: value}
    assert isinstance(value, dict)
    return value


def known_keys(node: Node | None = None, above: str = "") -> Iterator[tuple[str, Node]]:
    """Every dotted key that the installed DeepSpeed knows, with its types, range and further keys.

    The file is what ``deepspeed/generate_deepspeed_keys.py`` writes, which describes it.
    """
    for name, child in (json.loads(KEYS.read_text()) if node is None else node).get("properties", {}).items():
        key = f"{above}.{name}".lstrip(".")
        yield key, child
        yield from known_keys(child, key)
