"""Any value under any key that is known: ``det-ds check`` accepts it or refuses it, and never ends in a traceback.

What is found has a message, its place and a fix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.config.deciding import known_keys
from tests.harness.checked import DEEPSPEED, TRIAL, reports
from tests.package import own_hyperparameters

SCHEMA_FILE = resources.files("determined_ds") / "experiment/schemas.json"
SCHEMAS = {each["$id"]: each for each in json.loads(SCHEMA_FILE.read_text(encoding="utf-8")).values()}
EXPERIMENT = SCHEMAS["http://determined.ai/schemas/expconf/v0/experiment.json"]
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
# A key or the place in a list, and the constants that stand beside it.
Step = tuple[str | int, Mapping[str, Any]]
Path_ = tuple[Step, ...]


def keys_of_schema(schema: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Every key that a schema of Determined knows: 0 stands for the items of a list, x for any name."""
    if not isinstance(schema, dict) or len(above) == 4:
        return
    schema = SCHEMAS.get(schema.get("$ref") or schema.get("optionalRef"), schema)
    for one in (schema.get("union") or schema.get("then", {}).get("union") or {"items": []})["items"]:
        yield from keys_of_schema(one, above)
    inner = schema.get("properties", {})
    beside = {key: sub["const"] for key, sub in inner.items() if isinstance(sub, dict) and "const" in sub}
    for key, sub in [*inner.items(), ("x", schema.get("additionalProperties")), (0, schema.get("items"))]:
        if key in inner or isinstance(sub, dict):
            yield (*above, (key, beside))
            yield from keys_of_schema(sub, (*above, (key, beside)))


def plain(*keys: str) -> list[Path_]:
    return [tuple((step, {}) for step in key.split(".")) for key in keys]


KEYS = {
    "DeepSpeed's": plain(*(key for key, _ in known_keys())),
    "Determined's": [*{repr(path): path for path in keys_of_schema(EXPERIMENT)}.values()],
    "the library's": plain(*(f"hyperparameters.{key}" for key in own_hyperparameters())),
}


def placed(base: Any, path: Path_, value: Any) -> Any:
    """A copy of a mapping with a value at a path, and with the switch of its section on."""
    if not path:
        return value
    (step, beside), *rest = path
    if step == 0:
        return [placed(None, tuple(rest), value)]
    known = base if isinstance(base, dict) else {}
    on = {"enabled": True} if "enabled" not in known and len(path) == 1 and base is None else {}
    return {**known, **on, **beside, str(step): placed(known.get(str(step)), tuple(rest), value)}


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


def judge(folder: Path, whose: str, path: Path_, value: Any, turn: int, way: int) -> None:
    """Check a value under a key of an experiment; or in its DeepSpeed JSON, laid over that, or in that by itself."""
    hyperparameters, ds = STRATEGIES[turn % len(STRATEGIES)]
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
    for number, path in enumerate(KEYS[whose]):
        judge(tmp_path, whose, path, VALUES[number % len(VALUES)], number, number % 3)
        judge(tmp_path, whose, path, None, 0, 0)
