"""Every way of training reports to the tools of ``hyperparameters.logging`` what it reports to its run directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.metrics_file import read_records
from determined_ds.protocol.run_dir import RunDir
from tests.command import ROOT, det_ds
from tests.runtime.logs.reading import Points, csv_rows, points_of, scalars
from tests.transformers.test_resume import experiment as of_transformers

OWN_SCRIPT = Path(__file__).with_name("own_script")
CSV = ("--set", "hyperparameters.logging.csv={}")
TENSORBOARD = ("--set", "hyperparameters.logging.tensorboard={}")


def in_file(run_dir: Path, name: str) -> Points:
    """A metric in ``metrics.csv``."""
    return points_of(csv_rows(run_dir / "metrics.csv"), name, "batches")


def in_run(run_dir: Path, group: str, metric: str) -> Points:
    """The same in ``metrics.jsonl``."""
    found = read_records(RunDir(run_dir).metrics, group)
    return [(record["steps_completed"], record["metrics"][metric]) for record in found]


def test_a_trial_that_is_resumed_goes_on_in_its_file(own_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("run", own_model / "experiment.yaml", own_model, "--run-dir", run_dir, *CSV)
    done = det_ds(*words)
    assert done.returncode == 0, done.stderr
    assert f"csv: {run_dir / 'metrics.csv'}" in done.stdout
    assert in_file(run_dir, "training/loss") == in_run(run_dir, "training", "loss")
    first = {steps: loss for steps, loss in in_file(run_dir, "training/loss") if steps <= 2}
    key = json.loads((run_dir / "logging.json").read_text())["key"]

    (at_two,) = [each for each in checkpoints_in(run_dir / "checkpoints") if each.steps_completed == 2]
    done = det_ds(*words, "--resume", at_two.uuid, "--set", "hyperparameters.fit.max_length.batches=4")
    assert done.returncode == 0, done.stderr
    assert in_file(run_dir, "training/loss") == in_run(run_dir, "training", "loss")
    assert [steps for steps, _ in in_file(run_dir, "training/loss")] == [1, 2, 3, 4]
    assert in_file(run_dir, "training/loss")[:2] == [*first.items()]
    losses = in_run(run_dir, "validation", "validation_loss")
    assert in_file(run_dir, "validation/validation_loss") == losses
    assert json.loads((run_dir / "logging.json").read_text())["key"] == key

    before = (run_dir / "metrics.csv").read_bytes()
    done = det_ds("run", own_model / "experiment.yaml", own_model, "--evaluate", at_two.path, *CSV)
    assert done.returncode == 0, done.stderr
    assert "csv: " not in done.stdout
    assert (run_dir / "metrics.csv").read_bytes() == before


def test_a_core_api_script_reports_to_them_and_to_tensorboard_by_the_same_names(tmp_path: Path) -> None:
    own = shutil.copytree(OWN_SCRIPT, tmp_path / "own", ignore=shutil.ignore_patterns("__pycache__"))
    run_dir = tmp_path / "run"
    done = det_ds("run", own / "experiment.yaml", own, "--run-dir", run_dir, *CSV, *TENSORBOARD)
    assert done.returncode == 0, done.stderr
    losses = in_run(run_dir, "training", "loss")
    assert [steps for steps, _ in losses] == list(range(1, 9))
    assert in_file(run_dir, "training/loss") == losses
    shown = scalars(run_dir / "tensorboard", "training/loss")
    assert [(steps, pytest.approx(loss)) for steps, loss in losses] == shown
    assert len(list((run_dir / "tensorboard").glob("events*"))) == 1  # not by Determined's names, too


def test_a_trainer_of_transformers_that_is_killed_goes_on_in_its_file(tmp_path: Path) -> None:
    config: dict[str, Any] = of_transformers(1)
    config["resources"]["slots_per_trial"] = 1
    config["hyperparameters"]["logging"] = {"csv": {}}
    file, run_dir = tmp_path / "experiment.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump({**config, "max_restarts": 0}))
    words = ("run", file, ROOT, "--run-dir", run_dir)
    assert det_ds(*words, env={"KILL_AT": "step:7"}).returncode == 1
    done = det_ds(*words, "--resume")
    assert done.returncode == 0, done.stderr
    losses = in_run(run_dir, "training", "loss")
    assert in_file(run_dir, "training/loss") == losses
    assert len({steps for steps, _ in losses}) == len(losses)
    assert in_file(run_dir, "validation/eval_loss") == in_run(run_dir, "validation", "eval_loss")
