"""Whatever is changed in a good file, or written under a key: never a traceback, always the place and a fix."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from tests.config.deciding import known_keys
from tests.harness.checked import DEEPSPEED, TRIAL, findings
from tests.harness.command import ROOT
from tests.harness.damaging import damaged
from tests.package import own_hyperparameters

NUM_MUTANTS = 4 * settings().max_examples
EXPERIMENTS = ROOT / "experiments"
GOOD = [*sorted(EXPERIMENTS.glob("gpt2/*.yaml")), *sorted(EXPERIMENTS.glob("deepspeed/*.json"))]


def assert_all_is_said(folder: Path, context: Path, files: dict[str, Any]) -> None:
    """Check files, as they are written from JSON."""
    for name, content in files.items():
        text = json.dumps(content, indent=1)
        if name.endswith(".yaml"):
            text = text.replace("NaN", ".nan").replace("Infinity", ".inf")
        (folder / name).write_text(text)
    for each in findings(*(folder / name for name in files), context):
        assert each.message, each
        assert each.fix, each
        assert 1 <= each.line <= Path(each.file).read_text().count("\n") + 1, each
        assert each.column >= 1


@pytest.mark.parametrize("seed", range(NUM_MUTANTS))
def test_whatever_is_changed_in_a_good_file(tmp_path: Path, seed: int) -> None:
    """Up to three things; a DeepSpeed JSON by itself, and in an experiment."""
    good, choices = GOOD[seed % len(GOOD)], random.Random(seed)
    mutant = yaml.safe_load(good.read_text())
    for _ in range(choices.randint(1, 3)):
        mutant = damaged(mutant, choices)
    written = {"a.yaml": mutant}
    if good.suffix == ".json":
        whole = yaml.safe_load((EXPERIMENTS / "gpt2/const.yaml").read_text())
        whole["hyperparameters"]["deepspeed_config"] = {"type": "const", "val": mutant}
        written = {"ds.json": mutant, "a.yaml": whole}
    assert_all_is_said(tmp_path, ROOT, written)


VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**70, 0.5, float("nan"), float("inf"), "", "auto", "x"),
    *([], [1], {}, {"a": 1}, {"a": {"b": [{"c": None}]}}),
]
# Hyperparameters, and a JSON, that a value meets.
ZERO, BF16 = "zero_optimization", {"bf16": {"enabled": True}}
STRATEGIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {**DEEPSPEED, "fp16": {"enabled": True}, ZERO: {"stage": 1}}),
    ({}, {**DEEPSPEED, **BF16, ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ({"zero_stage": 3}, DEEPSPEED),
    (
        {"pipe_parallel_size": 2, "pipe_schedule": "interleaved", "micro_batch_size": 2},
        {**DEEPSPEED, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
]
KEYS = [
    *(f"hyperparameters.{key}" for key in own_hyperparameters()),
    *(
        f"hyperparameters.{('deepspeed_config', 'overwrite_deepspeed_args')[number % 2]}.val.{key}"
        for number, (key, _) in enumerate(known_keys())
    ),
]


def placed(base: Any, path: list[str], value: Any) -> Any:
    """A copy of a mapping with a value at a path, and with the switch of its section on."""
    if not path:
        return value
    known = base if isinstance(base, dict) else {}
    on = {"enabled": True} if len(path) == 1 and base is None else {}
    return {**known, **on, path[0]: placed(known.get(path[0]), path[1:], value)}


@pytest.mark.parametrize("part", range(2))
def test_whatever_is_written_under_a_key_of_deepspeed_or_the_library(part: int, tmp_path: Path) -> None:
    """A value of each kind in turn; and null, which reached rules that compare numbers."""
    (tmp_path / "trial.py").write_text(TRIAL)
    for number, key in [*enumerate(KEYS)][part::2]:
        for value, turn in ((VALUES[number % len(VALUES)], number), (None, 0)):
            hyperparameters, ds = STRATEGIES[turn % len(STRATEGIES)]
            own = {"global_batch_size": 16, "learning_rate": 0.1, "fit": {"max_length": {"batches": 64}}}
            own |= {**hyperparameters, "deepspeed_config": {"type": "const", "val": ds}}
            own["overwrite_deepspeed_args"] = {"type": "const", "val": {}}
            config = {
                "name": "a",
                "entrypoint": "python3 -m determined_ds.train trial:T",
                "resources": {"slots_per_trial": 4},
                "searcher": {"name": "single", "metric": "validation_loss"},
                "max_restarts": 0,
                "hyperparameters": own,
            }
            assert_all_is_said(tmp_path, tmp_path, {"a.yaml": placed(config, key.split("."), value)})
