"""What a run reports to, or needs, must be there: a server of MLflow's on a cluster, the package of a tool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.package import ROOT, check


def test_mlflow_without_a_server_is_warned_of_on_a_cluster() -> None:
    """What it writes would lie in a container."""

    def findings(*overrides: str) -> list[tuple[str, str]]:
        (report,) = check([ROOT / "experiments/gpt2/const.yaml"], context_dir=ROOT, overrides=overrides)
        return [(found.problem.key, found.problem.code) for found in report.findings]

    mlflow = "hyperparameters.logging.mlflow=true"
    assert findings(mlflow) == [("hyperparameters.logging.mlflow", "logger-server")]
    server = 'environment.environment_variables=["MLFLOW_TRACKING_URI=http://mlflow:5000"]'
    assert findings(mlflow, server) == []


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
