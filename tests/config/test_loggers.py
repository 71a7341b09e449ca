"""``hyperparameters.logging``: options by the clients' own names, none misspelt, no secret, no absent package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.package import ROOT, check, decide, refusal

CONST = ROOT / "experiments" / "gpt2" / "const.yaml"


def decided(logging: Any, **ds: Any) -> Any:
    return decide({"logging": logging}, {"train_batch_size": 8, **ds})


def findings(*overrides: str) -> set[tuple[str, str]]:
    """Key and code of what a check finds in a template with overrides."""
    (report,) = check([CONST], context_dir=ROOT, overrides=overrides)
    return {(found.problem.key, found.problem.code) for found in report.findings}


@pytest.mark.parametrize(
    ("logging", "key", "fix"),
    [
        ("wandb", "", "write logging: {wandb: "),
        ({"wnadb": {}}, ".wnadb", "did you mean 'wandb'?"),
        ({"wandb": {"projct": "x"}}, ".wandb.projct", "did you mean 'project'?"),
        ({"wandb": {"mode": "offlin"}}, ".wandb.mode", "use one of online, offline, disabled"),
        ({"mlflow": {"tags": {"a": [1]}}}, ".mlflow.tags.a", "write a string"),
    ],
)
def test_what_no_client_takes_is_refused_with_what_it_takes(logging: Any, key: str, fix: str) -> None:
    problem = refusal(lambda: decided(logging))
    assert problem.key == f"hyperparameters.logging{key}"
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("tool", "option", "secret", "variable"),
    [
        ("wandb", "api_key", "anything", "WANDB_API_KEY"),
        ("mlflow", "tracking_uri", "http://me:swordfish@mlflow.local", "MLFLOW_TRACKING_PASSWORD"),
    ],
)
def test_a_secret_is_refused_and_shown_nowhere(tool: str, option: str, secret: str, variable: str) -> None:
    problem = refusal(lambda: decided({tool: {option: secret}}))
    assert variable in problem.fix
    assert "in the environment" in problem.fix
    assert secret not in str(problem)
    assert decided({"wandb": {"group": "a1b2c3d4" * 5}})  # a commit; a key of W&B of before looks alike


def test_mlflow_without_a_server_is_warned_of_on_a_cluster() -> None:
    assert ("hyperparameters.logging.mlflow", "logger-server") in findings(
        "hyperparameters.logging.mlflow=true"
    )
    server = 'environment.environment_variables=["MLFLOW_TRACKING_URI=http://mlflow:5000"]'
    assert findings("hyperparameters.logging.mlflow=true", server) == set()


# ------------------------------------------------------------------------------------ DeepSpeed's own monitors


def test_a_monitor_of_deepspeed_beside_the_tool_is_refused_and_alone_is_hinted_at() -> None:
    problem = refusal(lambda: decided({"wandb": {}}, wandb={"enabled": True}))
    assert (problem.key, problem.code) == ("wandb.enabled", "reported-twice")
    (warning,) = decided({"mlflow": {}}, wandb={"enabled": True}).warnings
    assert (warning.key, warning.code) == ("wandb.enabled", "monitor")
    assert "write hyperparameters.logging: {wandb: {}}" in warning.fix
    assert decided({}, tensorboard={"enabled": True}, csv_monitor={"enabled": True}).warnings == ()


# ----------------------------------------------------------------------------------------- absent packages


@pytest.mark.parametrize(
    ("ds", "module", "key"),
    [
        ({"wandb": {"enabled": True}}, "wandb", "wandb.enabled"),
        ({"optimizer": {"type": "MuAdamW", "params": {"lr": 0.1}}}, "mup", "optimizer.type"),
    ],
)
def test_a_package_that_a_json_needs_and_this_machine_lacks_is_a_warning(
    ds: dict[str, Any], module: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's image may have it."""
    monkeypatch.setitem(sys.modules, module, None)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ds))
    (report,) = check([file])
    (found,) = [each for each in report.findings if each.problem.code == "missing-package"]
    assert (found.severity, found.problem.key) == ("warning", key)
    assert f"pip install '{module}" in found.problem.fix
    file.write_text(json.dumps({key.partition(".")[0]: {}}))
    assert check([file])[0].findings == ()
