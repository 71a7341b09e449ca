"""Old names that DeepSpeed still reads mean what DeepSpeed reads in them, and are told by their new names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from determined_ds.config.deepspeed.alone import problems_alone
from determined_ds.config.deepspeed.normalized import located_problems, normalized
from determined_ds.config.deepspeed.old_names import NEW_NAMES
from determined_ds.documents.document import dotted
from tests.making import decide, ds_json, refusal

ZERO = "zero_optimization"
CASES = [
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({ZERO: {"stage": 2, "cpu_offload": True}}, {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ({ZERO: {"stage": 2, "cpu_offload": False}}, {ZERO: {"stage": 2}}),
    (
        {ZERO: {"stage": 3, "cpu_offload_param": True}},
        {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
    (
        {ZERO: {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        {ZERO: {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
    ),
]


@pytest.mark.parametrize(("old", "new"), CASES)
def test_an_old_name_is_read_as_the_new_one_and_told(old: dict[str, Any], new: dict[str, Any]) -> None:
    ds = ds_json(old)
    assert located_problems(ds) == []
    assert normalized(ds).data == new
    errors, warnings = problems_alone(ds)
    assert errors == []
    (told,) = warnings
    assert told.code == "deprecated-key"
    assert told.key in map(dotted, NEW_NAMES)


@pytest.mark.parametrize(("old", "new"), CASES)
def test_deepspeed_reads_the_same_in_both(
    old: dict[str, Any], new: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    config = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)

    def read(ds_config: dict[str, Any]) -> Any:
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
        return config.DeepSpeedConfig({"train_batch_size": 1, **ds_config}, mpu)

    one, other = read(old), read(new)
    assert one.bfloat16_config == other.bfloat16_config
    for name in ("stage", "offload_optimizer", "offload_param", "gather_16bit_weights_on_model_save"):
        assert getattr(one.zero_config, name) == getattr(other.zero_config, name)


def test_the_rules_look_behind_an_old_name() -> None:
    found = refusal(lambda: decide(ds={ZERO: {"stage": 2, "cpu_offload_param": True}}))
    assert (found.code, found.key) == ("offload-param-stage", "zero_optimization.offload_param")


def test_the_place_of_an_old_name_is_kept() -> None:
    ds = ds_json(
        '{"bfloat16":\n {"enabled": true},\n "zero_optimization": {"stage": 2,\n "cpu_offload": true}}'
    )
    made = normalized(ds)
    assert made.origin(("bf16", "enabled")) == "ds.json:2"
    assert made.origin((ZERO, "offload_optimizer", "device")) == "ds.json:4"


@pytest.mark.parametrize(
    ("ds", "key", "kept"),
    [
        ({"bfloat16": {"enabled": True}, "bf16": {"enabled": False}}, "bfloat16", "bf16"),
        (
            {ZERO: {"cpu_offload": True, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.cpu_offload",
            "offload_optimizer",
        ),
    ],
)
def test_both_names_at_once_are_refused(ds: dict[str, Any], key: str, kept: str) -> None:
    ((_, found),) = located_problems(ds_json(ds))
    assert (found.key, found.code, found.fix) == (key, "deprecated-key", f"remove it, and keep {kept}")


def test_an_overwrite_by_the_new_name_does_not_hide_the_old_one() -> None:
    hp = {
        "global_batch_size": 8,
        "overwrite_deepspeed_args": {ZERO: {"offload_optimizer": {"device": "none"}}},
    }
    found = refusal(lambda: decide(hp=hp, ds={ZERO: {"stage": 2, "cpu_offload": True}}))
    assert found.key == "zero_optimization.cpu_offload"


def test_the_values_of_an_old_name_are_judged() -> None:
    ((_, found),) = located_problems(ds_json({"bfloat16": {"enabled": 3}}))
    assert (found.key, found.code) == ("bfloat16.enabled", "wrong-type")
