"""Good files with keys and values gone, misspelt, wrapped or moved: never a traceback, always the place and a fix.

Damaged texts are in ``documents/test_reading.py``, other values under each key in ``test_wrong_values.py``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from tests.harness.checked import findings
from tests.harness.command import ROOT

NUM_MUTANTS = 6 * settings().max_examples
EXPERIMENTS = ROOT / "experiments"
GOOD = [*sorted(EXPERIMENTS.glob("gpt2/*.yaml")), *sorted(EXPERIMENTS.glob("deepspeed/*.json"))]


def paths_in(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value below the top."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [each for key, value in items for each in ((*path, key), *paths_in(value, (*path, key)))]


def mutant(good: Path, seed: int) -> Any:
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
    return data


@pytest.mark.parametrize("seed", range(NUM_MUTANTS))
def test_whatever_is_changed_in_it(tmp_path: Path, seed: int) -> None:
    """A DeepSpeed JSON by itself, and in an experiment."""
    good = GOOD[seed % len(GOOD)]
    written = {"a.yaml": mutant(good, seed)}
    if good.suffix == ".json":
        whole = yaml.safe_load((EXPERIMENTS / f"gpt2/{good.stem}.yaml").read_text())
        whole["hyperparameters"]["deepspeed_config"] = {"type": "const", "val": written["a.yaml"]}
        written = {"ds.json": written["a.yaml"], "a.yaml": whole}
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content, indent=2))
    for each in findings(*(tmp_path / name for name in written), "--context", ROOT):
        assert each.message
        assert each.fix, each
        assert 1 <= each.line <= Path(each.file).read_text().count("\n") + 1, each
        assert each.column >= 1
