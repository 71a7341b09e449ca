"""A package that the JSON asks for and the machine lacks is told before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds.check.inputs import check_files
from determined_ds.config.deepspeed import packages
from determined_ds.config.deepspeed.packages import MONITORS, missing_packages
from determined_ds.config.resolve import Where
from determined_ds.experiment.decide import decide
from determined_ds.experiment.experiment import load_experiment
from tests.making import CPU, ROOT, ds_json, refusal

CONST = ROOT / "experiments" / "gpt2" / "const.yaml"
WANDB = "hyperparameters.overwrite_deepspeed_args.wandb.enabled=true"


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has none of them."""
    monkeypatch.setattr(packages, "find_spec", lambda module: None)


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize(
    ("ds", "key", "package"),
    [
        *(({section: {"enabled": True}}, f"{section}.enabled", row[1]) for section, row in MONITORS.items()),
        ({"optimizer": {"type": "MuAdamW"}}, "optimizer.type", "mup"),
    ],
)
def test_each_package_that_is_asked_for(ds: dict[str, Any], key: str, package: str) -> None:
    (problem,) = missing_packages(ds_json(ds))
    assert problem.key == key
    assert f"needs the package {package}, which is not installed" in problem.message
    assert f"pip install '{package}'" in problem.fix


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize(
    "ds", [{}, {"wandb": {"enabled": False}}, {"wandb": {"project": "x"}}, {"csv_monitor": {"enabled": True}}]
)
def test_what_is_not_asked_for_may_be_missing(ds: dict[str, Any]) -> None:
    assert missing_packages(ds_json(ds)) == []


def test_what_is_installed_is_not_missing() -> None:
    assert missing_packages(ds_json({"tensorboard": {"enabled": True}})) == []


@pytest.mark.usefixtures("lacking")
def test_a_run_here_is_refused_and_a_look_at_it_is_not() -> None:
    experiment = load_experiment(CONST, [WANDB])
    where = Where(context_dir=ROOT, accelerator=CPU)
    assert decide(experiment, experiment.hyperparameters, where).zero_stage == 1
    problem = refusal(lambda: decide(experiment, experiment.hyperparameters, where, here=True))
    assert (problem.key, problem.code) == ("wandb.enabled", "missing-package")
    assert problem.origin == f"--set {WANDB}"


@pytest.mark.usefixtures("lacking")
def test_a_check_warns_since_its_machine_is_not_the_cluster(tmp_path: Path) -> None:
    report, *_ = check_files([CONST], context_dir=ROOT, overrides=[WANDB])
    found = {(f.severity, f.problem.code) for f in report.findings}
    assert found == {("warning", "missing-package"), ("warning", "monitor")}
    json = tmp_path / "ds.json"
    json.write_text('{"comet": {"enabled": true}}')
    (report,) = check_files([json])
    assert {(f.severity, f.problem.key) for f in report.findings} == {("warning", "comet.enabled")}
