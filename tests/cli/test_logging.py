"""A trial and a script report to the tools of ``hyperparameters.logging`` what they report to their run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.own_runs import LENGTH, OWN_SCRIPT, at
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


def in_tensorboard(run_dir: Path, tag: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]


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


def test_a_core_api_script_reports_to_tensorboard_by_the_same_names(tmp_path: Path) -> None:
    own = shutil.copytree(OWN_SCRIPT, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    run_dir = tmp_path / "run"
    tensorboard = ("--set", "hyperparameters.logging.tensorboard={}")
    done = det_ds("run", own / "experiment.yaml", own, "--run-dir", run_dir, *tensorboard)
    assert done.returncode == 0, done.stderr
    losses = reported(run_dir, "training", "loss")
    assert [steps for steps, _ in losses] == list(range(1, 9))
    assert in_tensorboard(run_dir, "training/loss") == losses
    assert len(list((run_dir / "tensorboard").glob("events*"))) == 1, "not by Determined's names, too"
