"""Good files with keys and values gone, misspelt, wrapped or moved: never a traceback, always the place and a fix.

Damaged texts are in ``documents/test_reading.py``, other values under each key in ``test_wrong_values.py``.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from tests.harness.checked import findings
from tests.harness.command import ROOT

NUM_MUTANTS = 6 * settings().max_examples
GOOD = [
    *sorted((ROOT / "experiments" / "gpt2").glob("*.yaml")),
    *sorted((ROOT / "experiments" / "deepspeed").glob("*.json")),
]


def paths_in(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below the top."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [each for key, value in items for each in ((*path, key), *paths_in(value, (*path, key)))]


def mutant(good: Path, seed: int) -> str:
    """A good file with one to three changes; the same for the same seed."""
    draw, data = random.Random(seed), yaml.safe_load(good.read_text())
    for _ in range(draw.randint(1, 3)):
        *above, key = draw.choice(paths_in(data))
        holder = data
        for step in above:
            holder = holder[step]
        value = holder.pop(key)
        word = key if isinstance(key, str) and key else "moved"
        at = draw.randrange(len(word))
        what = draw.choice(["gone", "misspelt", "wrapped", "moved", "number"])
        if what == "gone":
            continue
        if what == "misspelt":
            spelt = [word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word[::-1], word.upper()]
            word = draw.choice(spelt)
        elif what == "wrapped":
            value = draw.choice([{word: value}, [value, value], {"type": "const", "val": value}, str(value)])
        elif what == "moved":
            holder = data
        elif isinstance(value, (int, float)):
            value = draw.choice([-value, value + 1, value * 10**6, float(value) + 0.5])
        if isinstance(holder, dict):
            holder[word] = value
        else:
            holder.insert(0, value)
    return json.dumps(data, indent=2) if good.suffix == ".json" else yaml.safe_dump(data, sort_keys=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context directory to damage a file in."""
    folder = tmp_path_factory.mktemp("context")
    for name in ("experiments", "model_defs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("seed", range(NUM_MUTANTS))
def test_whatever_is_changed_in_it(folder: Path, seed: int) -> None:
    good = GOOD[seed % len(GOOD)]
    damaged = folder / good.relative_to(ROOT)
    damaged.write_text(mutant(good, seed))
    files = [damaged]
    if good.suffix == ".json":  # by itself, and in an experiment
        files.append(folder / "experiments" / "gpt2" / f"{good.stem}.yaml")
    try:
        for each in findings(*files, folder):
            assert each.message
            assert each.fix, each
            assert 1 <= each.line <= Path(each.file).read_text().count("\n") + 1, each
            assert each.column >= 1
    finally:
        shutil.copy(good, damaged)
