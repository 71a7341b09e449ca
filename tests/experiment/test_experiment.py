"""An experiment YAML means here what it means to Determined, and what Determined would refuse is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds import load_experiment
from tests.harness.checked import report_of
from tests.package import CPU, ENTRYPOINT, experiment, refusal, refusals, resolved_of


@pytest.mark.parametrize("nulls", ["", "resources:\nhyperparameters:\nname:\nsearcher:\n"])
def test_what_is_absent_has_determineds_default(nulls: str) -> None:
    read = experiment(f"entrypoint: {ENTRYPOINT}\n{nulls}")
    assert (read.name, read.slots, read.metric, read.smaller_is_better) == ("unnamed", 1, "", True)
    assert read.hyperparameters.data == {}


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


def test_a_trial_in_determineds_own_form_trains_as_long_as_the_experiment_says() -> None:
    """What ``fit`` says stays; 0 is no period; a length in records, which nothing here counts, is refused."""
    config = {
        "entrypoint": "python3 -m determined.launch.deepspeed --trial trial:Trial",
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10}},
        "min_validation_period": {"batches": 5},
        "min_checkpoint_period": {"batches": 0},
        "scheduling_unit": 4,
        "hyperparameters": {"global_batch_size": 8, "fit": {"validation_period": {"batches": 2}}},
    }
    read = experiment(config)
    periods = {"validation_period": {"batches": 2}, "reporting_period": {"batches": 4}}
    assert read.hyperparameters.data["fit"] == {**periods, "max_length": {"batches": 10}}
    config["searcher"] = {"name": "single", "metric": "loss", "max_length": {"records": 87}}
    problem = refusal(lambda: resolved_of(experiment(config), CPU))
    assert problem.key.startswith("hyperparameters.fit.max_length")
    assert "searcher.max_length" in problem.origin


# ------------------------------------------------------------------------------------------------------- --set

BASE = f"""
name: base
entrypoint: {ENTRYPOINT}
resources: {{slots_per_trial: 2}}
hyperparameters: {{fit: {{max_length: {{batches: 200}}}}, nothing: null}}
data: {{path: x, tokenizer: null}}
"""
OVERRIDES = [
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
]


def as_the_master_gets_it(text: str, override: str) -> Any:
    """What `det experiment create --config` sends, as the master reads it.

    Between the two `yes` and a date change what they are: to `det` they are a word and a date, to the master
    a boolean and a word. `1e-3` is a number to both, as it is here; only plain PyYAML takes it for a word.
    """
    from determined.cli.ntsc import parse_config_overrides
    from determined.common.util import yaml_safe_dump, yaml_safe_load

    sent = yaml_safe_dump(parse_config_overrides(yaml_safe_load(text), [override]))
    assert sent is not None
    return experiment(sent).config


def as_we_get_it(folder: Path, override: str) -> Any:
    (folder / "a.yaml").write_text(BASE)
    return load_experiment(folder / "a.yaml", [override]).config


@pytest.mark.parametrize("override", OVERRIDES)
def test_set_means_what_config_means_to_det(tmp_path: Path, override: str) -> None:
    assert as_we_get_it(tmp_path, override) == as_the_master_gets_it(BASE, override)


NO_SETTINGS = dict.fromkeys(["", "name", "=1", ".=1", "a..b=1", "a.=1", ".a=1"], "is not KEY=VALUE")
NO_YAML = ["[1", "{a: 1, a: 2}", "a: b: c", ".nan", "*a", "&a [*a]", "1,[2"]


@pytest.mark.parametrize(
    ("override", "said"), {**NO_SETTINGS, **{f"name={value}": "--set name" for value in NO_YAML}}.items()
)
def test_what_is_no_setting_is_refused(tmp_path: Path, override: str, said: str) -> None:
    assert said in str(refusal(lambda: as_we_get_it(tmp_path, override)))


@pytest.mark.parametrize(
    ("variables", "severity", "key"),
    [(["RANK=3", "A=1"], "warning", "0"), ({"tpu": ["A=1"]}, "error", "tpu"), (["=1"], "error", "0")],
)
def test_variables_that_a_launch_sets_and_devices_that_are_none_are_found(
    tmp_path: Path, variables: Any, severity: str, key: str
) -> None:
    (only,) = report_of(tmp_path, environment={"environment_variables": variables})["findings"]
    assert (only.severity, only.key) == (severity, f"environment.environment_variables.{key}")
    assert "did you mean" not in only.fix
