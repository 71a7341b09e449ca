"""Good files spoilt at random: by their text, and by what they say."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

SPOILERS: list[Any] = [
    None, True, "", "auto", "x", "1", 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, [], {}, [None],
    {"type": "x"}, {"type": None}, {"type": ["const"]}, {"type": "int"}, {"val": 1},
    {"type": "categorical", "vals": []},
    {"type": "int", "minval": 0, "maxval": 10**18}, {"type": "double", "minval": 0, "maxval": 1, "count": 10**9},
    {"type": "log", "minval": -400, "maxval": 400, "base": 10.0}, {"batches": 0}, {"epochs": []}, "\x85", "a" * 100_000,
]  # fmt: skip


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def paths_in(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below the top."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = [path] if path else []
    for key, value in items:
        found += paths_in(value, (*path, key))
    return found


def misspelt(word: str, source: random.Random) -> str:
    at = source.randrange(len(word)) if word else 0
    return source.choice([word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word[::-1], word.upper()])


def spoilt_data(data: Any, source: random.Random) -> Any:
    """One to three changes of what a file says."""
    data = copy.deepcopy(data)
    for _ in range(source.randint(1, 3)):
        paths = paths_in(data)
        if not paths:
            break
        path = source.choice(paths)
        holder = data
        for step in path[:-1]:
            holder = holder[step]
        key, action = path[-1], source.randrange(6)
        value = holder.pop(key)
        name = key if isinstance(key, str) else 0
        if action == 0:
            continue
        if action == 1 and isinstance(name, str):
            name = misspelt(name, source)
        elif action == 2:
            value = source.choice(SPOILERS)
        elif action == 3:
            value = source.choice(
                [{str(name): value}, [value, value], {"type": "const", "val": value}, str(value)]
            )
        elif action == 4:
            holder, value = data, value
        elif action == 5 and isinstance(value, (int, float)):
            value = source.choice([-value, value + 1, value * 10**6, float(value) + 0.5])
        if isinstance(holder, dict):
            holder[name if isinstance(name, str) else "moved"] = value
        else:
            holder.insert(0, value)
    return data


def _at_random_line(change: Callable[[str], str]) -> Callable[[str, random.Random], str]:
    def changed(text: str, source: random.Random) -> str:
        lines = text.splitlines(keepends=True)
        at = source.randrange(len(lines))
        lines[at] = change(lines[at])
        return "".join(lines)

    return changed


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
TEXT_CHANGES: list[Callable[[str, random.Random], str]] = [
    _at_random_line(lambda line: ""),
    _at_random_line(lambda line: line + line),
    _at_random_line(lambda line: "\t" + line),
    _at_random_line(lambda line: "   " + line),
    _at_random_line(lambda line: line.lstrip()),
    _at_random_line(lambda line: line.replace(":", "", 1)),
    _at_random_line(lambda line: line.replace('"', "", 1)),
    _at_random_line(lambda line: line.replace("{", "[", 1)),
    _at_random_line(lambda line: line.replace(",", ",,", 1)),
    _at_random_line(lambda line: line.rstrip("\n") + " # {[\n"),
    _at_random_line(lambda line: line.replace(": ", ": &a *a ", 1)),
    _at_random_line(lambda line: line.replace(": ", ": !!python/object:os.system ", 1)),
    _at_random_line(lambda line: line.replace(": ", ": \x00", 1)),
    lambda text, source: text[: source.randrange(len(text))],
    lambda text, source: "\ufeff" + text,
    lambda text, source: text.replace("\n", "\r\n"),
    lambda text, source: text + LAUGHS,
    lambda text, source: text + "deep: " + "[" * 5000 + "]" * 5000 + "\n",
    lambda text, source: text + "---\n" + text,
    lambda text, source: "<<: *nothing\n" + text,
    lambda text, source: text.replace("1", "9" * source.choice([20, 400, 5000]), 1),
    lambda text, source: "".join(source.sample(text, len(text))),
    lambda text, source: "",
    lambda text, source: " \n\n",
    lambda text, source: "null\n",
    lambda text, source: "- a\n- b\n",
    lambda text, source: '"text"',
]


def mutant(good: Path, seed: int) -> bytes:
    """A spoilt copy of a good file; the same for the same seed."""
    source = random.Random(seed)
    text = good.read_text()
    if source.random() < 0.05:
        return bytes(source.randrange(256) for _ in range(source.randrange(2000)))
    if source.random() < 0.35:
        return source.choice(TEXT_CHANGES)(text, source).encode("utf-8", "surrogatepass")
    if source.random() < 0.03:
        where = nested(source.choice([50, 99, 101, 200]))
        data = {**yaml.safe_load(text), source.choice(["searcher", "hyperparameters", "optimizer"]): where}
    else:
        data = spoilt_data(yaml.safe_load(text), source)
    if good.suffix == ".json":
        return json.dumps(data, indent=2).encode()
    return yaml.safe_dump(data, sort_keys=False).encode()
