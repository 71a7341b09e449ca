"""What runs were given, with where it came from, and in what they differ."""

from __future__ import annotations

from pathlib import Path

from determined_ds.report.runs.given_values import (
    RUN_DIR,
    DifferingKey,
    Setting,
    configuration,
    differences,
    environment,
)
from tests.report.recorded import launch, recorded, shown


def test_what_was_decided_what_was_asked_for_and_what_deepspeed_gets(tmp_path: Path) -> None:
    sections = configuration(shown(recorded(tmp_path / "run")))
    assert list(sections) == ["decided", "hyperparameters", "DeepSpeed"]
    assert sections["decided"]["strategy"] == Setting(value="ZeRO 1")
    assert sections["hyperparameters"]["fit.max_length.batches"] == Setting(value="40")
    assert sections["DeepSpeed"] == {
        "train_batch_size": Setting(value="32", origin="global_batch_size, gpt2.yaml:11"),
        "zero_optimization.stage": Setting(value="1", origin="zero1.json:6"),
    }


def test_a_run_of_an_earlier_version_has_what_its_files_say(tmp_path: Path) -> None:
    path = recorded(
        tmp_path / "run", launches=(), config={"hyperparameters": {"lr": 1, "deepspeed_config": {}}}
    )
    (path / "deepspeed_config.json").write_text('{"bf16": {"enabled": false}, "empty": {}}')
    found = shown(path)
    assert configuration(found) == {
        "hyperparameters": {"lr": Setting(value="1")},
        "DeepSpeed": {"bf16.enabled": Setting(value="false"), "empty": Setting(value="{}")},
    }
    assert environment(found) == {}


def test_a_path_in_the_run_directory_is_no_difference(tmp_path: Path) -> None:
    each = []
    for name in ("one", "two"):
        config = {"tensorboard": {"output_path": str(tmp_path / name / "tensorboard")}}
        each.append(configuration(shown(recorded(tmp_path / name, launches=[launch(ds_config=config)]))))
    assert each[0]["DeepSpeed"]["tensorboard.output_path"].value == f"{RUN_DIR}/tensorboard"
    assert differences([sections["DeepSpeed"] for sections in each]) == []


def test_keys_that_one_lacks_differ() -> None:
    one, two = (
        {"a": Setting(value="1"), "b": Setting(value="2")},
        {"b": Setting(value="2"), "c": Setting(value="3")},
    )
    assert differences([one, two]) == [
        DifferingKey(key="a", values=("1", None)),
        DifferingKey(key="c", values=(None, "3")),
    ]


def test_memory_of_a_machine_is_in_gib(tmp_path: Path) -> None:
    assert environment(shown(recorded(tmp_path / "run")))["memory"].value == "16.0 GiB"
