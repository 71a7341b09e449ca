"""An experiment YAML means here what it means to Determined, and what Determined would refuse is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds import load_experiment
from tests.harness.checked import report_of
from tests.package import ENTRYPOINT, experiment, refusal, refusals


def test_what_is_absent_has_determineds_default() -> None:
    read = experiment({"entrypoint": ENTRYPOINT})
    assert (read.name, read.slots, read.seed, read.metric) == ("unnamed", 1, 0, "")
    assert read.smaller_is_better
    assert read.hyperparameters.data == {}
    assert experiment(f"entrypoint: {ENTRYPOINT}\nresources:\nhyperparameters:\nname:\n").slots == 1


def test_all_that_is_wrong_is_reported_at_once_each_at_its_line() -> None:
    text = """
nam: x
resources: {slots_per_trial: 0}
reproducibility: {experiment_seed: -1}
searcher: {name: asha, smaller_is_better: 1}
hyperparameters: {lr: {type: lg}}
entrypoint: torchrun train.py
"""
    problems = refusals(lambda: experiment(text, "a.yaml"))
    assert sorted((str(problem.origin), problem.key) for problem in problems) == [
        ("a.yaml:2", "nam"),
        ("a.yaml:3", "resources.slots_per_trial"),
        ("a.yaml:4", "reproducibility.experiment_seed"),
        ("a.yaml:5", "searcher.name"),
        ("a.yaml:5", "searcher.smaller_is_better"),
        ("a.yaml:6", "hyperparameters.lr"),
        ("a.yaml:7", "entrypoint"),
    ]


# ------------------------------------------------------------------------------------------------------- --set

BASE = """
name: base
resources: {slots_per_trial: 2}
data: {path: x, tokenizer: null}
hyperparameters:
  global_batch_size: 32
  fit: {max_length: {batches: 200}}
  nothing:
"""
OVERRIDES = [
    "name=other",
    "name=a=b",
    "data.words=a,b,3",
    "hyperparameters.fit={reporting_period: {batches: 5}}",
    "hyperparameters.lr=1e-3",
    "hyperparameters.lr={type: log, minval: -3, maxval: -2, base: 10}",
    "hyperparameters.list=[1, [2, 3], {a: b}]",
    "hyperparameters.padded=010",
    "hyperparameters.time=1:30",
    "hyperparameters.date=2024-01-01",
    "hyperparameters.answer=yes",
    "bind_mounts={host_path: /a, container_path: /b}",
]


def as_the_master_gets_it(text: str, overrides: list[str]) -> Any:
    """What `det experiment create --config` sends, as the master reads it.

    Between the two `yes` and a date change what they are: to `det` they are a word and a date, to the master
    a boolean and a word. `1e-3` is a number to both, as it is here; only plain PyYAML takes it for a word.
    """
    from determined.cli.ntsc import parse_config_overrides
    from determined.common.util import yaml_safe_dump, yaml_safe_load

    sent = yaml_safe_dump(parse_config_overrides(yaml_safe_load(text), overrides))
    assert sent is not None
    return experiment(sent).config


def as_we_get_it(folder: Path, text: str, overrides: list[str]) -> Any:
    (folder / "a.yaml").write_text(text)
    return load_experiment(folder / "a.yaml", overrides).config


@pytest.mark.parametrize("override", OVERRIDES)
def test_set_means_what_config_means_to_det(tmp_path: Path, override: str) -> None:
    text = f"{BASE}entrypoint: {ENTRYPOINT}\n"
    assert as_we_get_it(tmp_path, text, [override]) == as_the_master_gets_it(text, [override])


@pytest.mark.parametrize("override", ["", "name", "=1", ".=1", "a..b=1", "a.=1", ".a=1"])
def test_what_is_no_setting_is_refused(tmp_path: Path, override: str) -> None:
    assert "KEY=VALUE" in refusal(lambda: as_we_get_it(tmp_path, BASE, [override])).message


@pytest.mark.parametrize("value", ["[1", "{a: 1, a: 2}", "a: b: c", ".nan", "*a", "&a [*a]", "1,[2"])
def test_a_setting_that_does_not_parse_is_refused_by_its_key(tmp_path: Path, value: str) -> None:
    problem = refusal(lambda: as_we_get_it(tmp_path, BASE, [f"name={value}"]))
    assert "--set name" in str(problem)


def test_a_setting_does_not_mix_two_types_of_hyperparameter(tmp_path: Path) -> None:
    """`det` merges mappings, so that the master would refuse what is left of the first."""
    text = f"{BASE}  lr: {{type: log, minval: -3, maxval: -2, base: 10}}\nentrypoint: {ENTRYPOINT}\n"
    override = "hyperparameters.lr={type: double, minval: 0.1, maxval: 0.2}"
    problem = refusal(lambda: as_we_get_it(tmp_path, text, [override]))
    assert "a.yaml:9, as by det: base would stay" in problem.message
    assert "in the file" in problem.fix


def test_variables_that_a_launch_sets_and_devices_that_are_none_are_found(tmp_path: Path) -> None:
    variables: list[Any] = [["RANK=3", "A=1"], {"tpu": ["A=1"]}, ["=1"]]
    found = [
        report_of(tmp_path, environment={"environment_variables": each})["findings"] for each in variables
    ]
    assert [[(each.severity, each.key.rpartition("_")[2]) for each in every] for every in found] == [
        [("warning", "variables.0")],
        [("error", "variables.tpu")],
        [("error", "variables.0")],
    ]
    assert "did you mean" not in found[1][0].fix
