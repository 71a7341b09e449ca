"""Damage to any configuration."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

Json = Any
Path = tuple[Any, ...]

ANYTHING = [None, 0, 1, -3, 2.5, True, "text", "", [], [1], {}, {"a": 1}, {"a": {"b": [{"c": None}]}}]
KINDS = """single random grid adaptive_asha async_halving custom adaptive sync_halving adaptive_simple s3 gcs azure
    shared_fs directory hdfs const categorical int double log cancel_retries exclude_node AdamW""".split()  # noqa: SIM905
NEW_KEYS = ["unknown", "type", "name", "metric", "bucket", "save_trial_best"]
ODD_TEXTS = ["../a", "a/..", "a/../b", "..", ".", "/a:/b\n", "8g\n", "single"]
DAMAGES = ["drop", "misspell", "move", "null", "replace", "bound", "wrap", "add", "swap"]


def paths_in(data: Json, path: Path = ()) -> Iterator[Path]:
    """The path of every value below the top."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from paths_in(item, (*path, key))


def damaged(config: dict[str, Json], choices: random.Random) -> dict[str, Json]:
    """A copy with one thing about it changed; that may leave it valid."""
    config = copy.deepcopy(config)
    paths = [*paths_in(config)]
    if not paths:
        return config
    *above, key = choices.choice(paths)
    parent: Json = config
    for step in above:
        parent = parent[step]
    how, value, word = choices.choice(DAMAGES), parent[key], str(key)
    if how in ("drop", "misspell", "move"):
        del parent[key]
    if how == "misspell" and isinstance(parent, dict):
        at = choices.randrange(len(word) + 1)
        slips = [word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word[1:], word[::-1], word.upper()]
        parent[choices.choice([*slips, f"{word}s"])] = value
    elif how == "move":
        choices.choice([config, *(each for each in config.values() if isinstance(each, dict))])[word] = value
    elif how == "null":
        parent[key] = None
    elif how == "wrap":
        const = {"type": "const", "val": value}
        parent[key] = choices.choice(
            [[value], [value, value], {"type": value}, {word: value}, const, str(value)]
        )
    elif how == "add" and isinstance(value, dict):
        value[choices.choice(NEW_KEYS)] = copy.deepcopy(choices.choice(ANYTHING))
    elif how == "swap" and isinstance(value, dict) and {"type", "name"} & value.keys():
        value["type" if "type" in value else "name"] = choices.choice(KINDS)
    elif how == "bound" and isinstance(value, (int, float)) and not isinstance(value, bool):
        near = [-value, value + 1, value + 0.5, value * 1.0, value * 10**6]
        parent[key] = choices.choice([*near, 0, -1, -2, 1.0, 100, 2**15, 2**32])
    elif how == "bound" and isinstance(value, str):
        parent[key] = choices.choice([*ODD_TEXTS, f"{value} "])
    elif how in ("replace", "bound", "add", "swap"):
        parent[key] = copy.deepcopy(choices.choice(ANYTHING))
    return config
