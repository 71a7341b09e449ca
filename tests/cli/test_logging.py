"""A trial that is resumed reports to its run of MLflow what it reports to its run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.own_runs import LENGTH, at
from tests.harness.command import det_ds
from tests.package import records

Points = list[tuple[int, Any]]


def reported(run_dir: Path, group: str, metric: str) -> Points:
    return [(step, metrics[metric]) for step, metrics in records(run_dir, group)]


def in_mlflow(run_dir: Path, metric: str) -> Points:
    """A metric of the one run that MLflow has; a step that was logged again counts by its last value."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    names = [each.experiment_id for each in client.search_experiments()]
    (run,) = client.search_runs(names)
    return sorted(
        {point.step: point.value for point in client.get_metric_history(run.info.run_id, metric)}.items()
    )


@pytest.mark.long("logs has each tool; here the database of MLflow is made, and a run resumed")
def test_a_trial_that_is_resumed_goes_on_in_its_run_of_mlflow(own_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tracking = json.dumps({"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"})
    words = ("run", own_model / "experiment.yaml", own_model, "--run-dir", run_dir)
    words += ("--set", f"hyperparameters.logging.mlflow={tracking}")
    done = det_ds(*words)
    assert done.returncode == 0, done.stderr
    assert in_mlflow(run_dir, "training/loss") == reported(run_dir, "training", "loss")
    done = det_ds(*words, "--resume", at(run_dir, 4).name, "--set", f"{LENGTH}=8")
    assert done.returncode == 0, done.stderr
    assert in_mlflow(run_dir, "training/loss") == reported(run_dir, "training", "loss")
    assert [step for step, _ in in_mlflow(run_dir, "training/loss")] == list(range(1, 9))
    losses = reported(run_dir, "validation", "validation_loss")
    assert in_mlflow(run_dir, "validation/validation_loss") == losses

    before = in_mlflow(run_dir, "training/loss")
    done = det_ds("run", *words[1:3], "--evaluate", at(run_dir, 6), *words[5:])
    assert done.returncode == 0, done.stderr
    assert in_mlflow(run_dir, "training/loss") == before
