"""Any value under any key that is known: ``det-ds check`` accepts it or refuses it, and never ends in a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.config.deciding import known_keys
from tests.harness.checked import DEEPSPEED, TRIAL, Found, reports
from tests.harness.master_schemas import EXPERIMENT, SCHEMAS
from tests.package import own_hyperparameters

VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**70, 0.5, float("nan"), float("inf"), "", "auto", "x"),
    *([], [1], {}, {"a": 1}, {"a": {"b": [{"c": None}]}}),
]
LONG = pytest.mark.long("every value under every key; the short test has one value under each")

# Hyperparameters, and a JSON, that each key of a DeepSpeed JSON meets.
ZERO = "zero_optimization"
BF16 = {"bf16": {"enabled": True}}
STRATEGIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16": ({}, {**DEEPSPEED, "fp16": {"enabled": True}, ZERO: {"stage": 1}}),
    "offload": ({}, {**DEEPSPEED, **BF16, ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    "ZeRO 3": ({"zero_stage": 3}, DEEPSPEED),
    "pipeline": (
        {"pipe_parallel_size": 2, "pipe_schedule": "interleaved", "micro_batch_size": 2},
        {**DEEPSPEED, **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
}
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


def plain(keys: Sequence[str]) -> list[Path_]:
    return [tuple((step, {}) for step in key.split(".")) for key in keys]


OF_MASTER = list({repr(path): path for path in keys_of_schema(EXPERIMENT)}.values())
OF_DEEPSPEED = plain([key for key, _ in known_keys()])
OWN = plain([f"hyperparameters.{key}" for key in own_hyperparameters()])


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
    own = {"global_batch_size": 16, "learning_rate": 0.1, "fit": {"max_length": {"batches": 64}}}
    return {
        "name": "a",
        "entrypoint": "python3 -m determined_ds.train trial:T",
        "resources": {"slots_per_trial": 4},
        "searcher": {"name": "single", "metric": "validation_loss"},
        "max_restarts": 0,
        "hyperparameters": {**own, "deepspeed_config": const(DEEPSPEED), **hyperparameters},
    }


def const(mapping: Any) -> dict[str, Any]:
    """As a hyperparameter, where a key "type" would be that of an axis."""
    return {"type": "const", "val": mapping}


def text(data: Any) -> str:
    """As YAML."""
    return json.dumps(data, indent=1).replace("NaN", ".nan").replace("Infinity", ".inf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "trial.py").write_text(TRIAL)
    return tmp_path


def check(folder: Path, config: Any, *, name: str = "a.yaml") -> list[Found]:
    """What it reports of the file; with exit status 0 or 2, see ``reports``."""
    (folder / name).write_text(text(config) if name.endswith(".yaml") else json.dumps(config))
    report, *_ = reports(folder / name, folder)
    assert report["file"] == str(folder / name)
    return list(report["findings"])


def of_deepspeed(folder: Path, strategy: str, path: Path_, value: Any, way: int) -> None:
    """A value in the DeepSpeed JSON of an experiment, laid over it, or in the JSON by itself."""
    hyperparameters, ds = STRATEGIES[strategy]
    wrong = placed({} if way == 1 else ds, path, value)
    if way == 2:
        check(folder, wrong, name="ds.json")
    elif way == 1:
        given = {"deepspeed_config": const(ds), "overwrite_deepspeed_args": const(wrong)}
        check(folder, experiment(**hyperparameters, **given))
    else:
        check(folder, experiment(**hyperparameters, deepspeed_config=const(wrong)))


def test_a_value_under_each_key_of_a_deepspeed_json(folder: Path) -> None:
    """Null under each as well: it reached rules that compare numbers."""
    for number, path in enumerate(OF_DEEPSPEED):
        strategy = list(STRATEGIES)[number % len(STRATEGIES)]
        of_deepspeed(folder, strategy, path, VALUES[number % len(VALUES)], number % 3)
        of_deepspeed(folder, "fp16", path, None, 0)


@LONG
@pytest.mark.parametrize("turn", range(len(STRATEGIES)), ids=STRATEGIES)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_value_under_every_key_of_a_deepspeed_json(turn: int, value: Any, folder: Path) -> None:
    for number, path in enumerate(OF_DEEPSPEED):
        of_deepspeed(folder, list(STRATEGIES)[turn], path, value, (number + turn) % 3)


@pytest.mark.parametrize("paths", [OF_MASTER, OWN], ids=["Determined's", "the library's"])
def test_a_value_under_each_key_of_an_experiment(paths: list[Path_], folder: Path) -> None:
    for number, path in enumerate(paths):
        check(folder, placed(experiment(), path, VALUES[number % len(VALUES)]))


@LONG
@pytest.mark.parametrize("paths", [OF_MASTER, OWN], ids=["Determined's", "the library's"])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_value_under_every_key_of_an_experiment(paths: list[Path_], value: Any, folder: Path) -> None:
    for path in paths:
        check(folder, placed(experiment(), path, value))
