"""Any value under any key that DeepSpeed or the library knows: ``check`` accepts it or refuses it, without a traceback.

What is found has a message, its place and a fix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.config.deciding import known_keys
from tests.harness.checked import DEEPSPEED, TRIAL, reports
from tests.package import own_hyperparameters

VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**70, 0.5, float("nan"), float("inf"), "", "auto", "x"),
    *([], [1], {}, {"a": 1}, {"a": {"b": [{"c": None}]}}),
]
# Hyperparameters, and a JSON, that a value meets.
ZERO = "zero_optimization"
BF16 = {"bf16": {"enabled": True}}
STRATEGIES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {**DEEPSPEED, "fp16": {"enabled": True}, ZERO: {"stage": 1}}),
    ({}, {**DEEPSPEED, **BF16, ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ({"zero_stage": 3}, DEEPSPEED),
    (
        {"pipe_parallel_size": 2, "pipe_schedule": "interleaved", "micro_batch_size": 2},
        {**DEEPSPEED, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
]
KEYS = {
    "DeepSpeed's": [key for key, _ in known_keys()],
    "the library's": [f"hyperparameters.{key}" for key in own_hyperparameters()],
}


def placed(base: Any, path: list[str], value: Any) -> Any:
    """A copy of a mapping with a value at a path, and with the switch of its section on."""
    if not path:
        return value
    known = base if isinstance(base, dict) else {}
    on = {"enabled": True} if len(path) == 1 and base is None else {}
    return {**known, **on, path[0]: placed(known.get(path[0]), path[1:], value)}


def experiment(**hyperparameters: Any) -> dict[str, Any]:
    """What is a mapping among the hyperparameters is one value."""
    own = {"global_batch_size": 16, "learning_rate": 0.1, **hyperparameters}
    wrapped = {
        key: {"type": "const", "val": value} if isinstance(value, dict) else value
        for key, value in own.items()
    }
    return {
        "name": "a",
        "entrypoint": "python3 -m determined_ds.train trial:T",
        "resources": {"slots_per_trial": 4},
        "searcher": {"name": "single", "metric": "validation_loss"},
        "max_restarts": 0,
        "hyperparameters": {**wrapped, "fit": {"max_length": {"batches": 64}}},
    }


def judge(folder: Path, whose: str, key: str, value: Any, turn: int, way: int) -> None:
    """Check a value under a key of an experiment; or in its DeepSpeed JSON, laid over that, or in that by itself."""
    hyperparameters, ds = STRATEGIES[turn % len(STRATEGIES)]
    path = key.split(".")
    file, config = folder / "a.yaml", experiment(**hyperparameters, deepspeed_config=ds)
    if whose != "DeepSpeed's":
        config = placed(config, path, value)
    elif way == 0:
        config = experiment(**hyperparameters, deepspeed_config=placed(ds, path, value))
    elif way == 1:
        over = placed({}, path, value)
        config = experiment(**hyperparameters, deepspeed_config=ds, overwrite_deepspeed_args=over)
    else:
        file, config = folder / "ds.json", placed(ds, path, value)
    text = json.dumps(config, indent=1)
    if file.suffix == ".yaml":
        text = text.replace("NaN", ".nan").replace("Infinity", ".inf")
    file.write_text(text)
    (folder / "trial.py").write_text(TRIAL)
    for each in (each for report in reports(file, folder) for each in report["findings"]):
        assert each.message, each
        assert each.fix, each
        assert 1 <= each.line <= Path(each.file).read_text().count("\n") + 1, each
        assert each.column >= 1


@pytest.mark.parametrize("whose", KEYS)
def test_a_value_and_null_under_each_key(whose: str, tmp_path: Path) -> None:
    """Null reached rules that compare numbers."""
    for number, key in enumerate(KEYS[whose]):
        judge(tmp_path, whose, key, VALUES[number % len(VALUES)], number, number % 3)
        judge(tmp_path, whose, key, None, 0, 0)
