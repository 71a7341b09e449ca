"""Trials of a cluster on a page, read by Determined's own client from a master that answers as a real one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.cluster.master import Master
from tests.cluster.state import Checkpoint, Experiment, Report, Trial, now
from tests.cluster.still import User, still_master
from tests.report.recorded import course, recorded
from tests.report.test_page import Page

CONFIG = {
    "name": "gpt2_cluster",
    "entrypoint": "python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial",
    "resources": {"slots_per_trial": 2},
    "searcher": {
        "name": "grid",
        "metric": "validation_loss",
        "smaller_is_better": True,
        "max_length": {"batches": 40},
    },
    "hyperparameters": {
        "global_batch_size": 32,
        "learning_rate": {"type": "categorical", "vals": [0.001, 0.002]},
    },
}


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    monkeypatch.setenv("HOME", str(tmp_path))  # the client keeps who is logged in there
    monkeypatch.chdir(tmp_path)
    with still_master() as made:
        monkeypatch.setenv("DET_MASTER", made.server.url)
        yield made


@pytest.fixture
def trials(master: Master) -> list[Trial]:
    """Two trials of a search; the first one has trained, was restarted once, and has warned."""
    experiment = User(master).create(CONFIG)
    first, second = master.trials_of(experiment)
    for step, value in ((10, 4.0), (20, 3.0), (20, 3.5), (30, "NaN")):
        repeated = (step, value) == (20, 3.0)
        report = {"loss": value, "samples_per_second": 100.0, "batches": step}
        first.reports.append(
            Report(
                group="training", steps=step, metrics=report, run_id=1 if repeated else 2, archived=repeated
            )
        )
    first.reports.append(Report(group="validation", steps=20, metrics={"validation_loss": 3.25}, run_id=2))
    first.reports.append(Report(group="dataset", steps=20, metrics={"rows": 7}, run_id=2))
    _keep(master, first, experiment)
    for line in (
        "[rank=1] WARNING: loader slow: 3 s",
        "[rank=0] WARNING: loader slow: 4 s",
        "INFO: fine",
        "ERROR: lost",
    ):
        master.log(first, line)
    return [first, second]


def _keep(master: Master, trial: Trial, experiment: Experiment) -> None:
    body = {
        "uuid": "a-uuid",
        "taskId": trial.task_id,
        "allocationId": None,
        "reportTime": now(),
        "resources": {"a": 1},
        "metadata": {"steps_completed": 20},
    }
    master.checkpoints["a-uuid"] = Checkpoint(uuid="a-uuid", trial_id=trial.id, run_id=2, steps=20, body=body)
    assert experiment.id


def invoke(*words: str | int) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_a_trial_is_shown_as_a_run_is(trials: list[Trial]) -> None:
    done = invoke("--trial", trials[0].id, "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["runs"]
    assert (found["label"], found["name"], found["status"]) == (
        f"trial {trials[0].id}",
        "gpt2_cluster",
        "running",
    )
    assert found["curves"]["training/loss"]["steps"] == [10, 20, 30]
    assert found["curves"]["training/loss"]["values"] == [4.0, 3.5, "NaN"]
    assert found["curves"]["dataset/rows"]["values"] == [7.0]
    assert found["best"] == {"metric": "validation_loss", "value": 3.25, "steps": 20}
    assert found["checkpoints"] == [{"uuid": "a-uuid", "steps_completed": 20}]
    assert found["configuration"]["hyperparameters"]["learning_rate"]["value"] == str(
        trials[0].hparams["learning_rate"]
    )
    warnings = [(each["level"], each["message"], each["count"], each["ranks"]) for each in found["warnings"]]
    assert warnings == [("WARNING", "loader slow: 3 s", 2, [0, 1]), ("ERROR", "lost", 1, [])]


@pytest.mark.parametrize(
    ("restarts", "kind"),
    [(0, "resume"), (2, "restart"), (1, "restart or resume")],
    ids=["paused", "lost", "both"],
)
def test_each_start_of_its_containers_is_shown(trials: list[Trial], restarts: int, kind: str) -> None:
    """And pauses are left out of the time of training."""
    trial = trials[0]
    trial.restarts = restarts
    [first] = trial.allocations
    trial.allocations = [
        replace(first, id=f"{trial.task_id}.{number}", start_time=f"2026-01-01T0{number}:00:00.719")
        for number in (1, 2, 3)
    ]
    for report, at in zip(trial.reports, ("01:10", "01:20", "01:20", "02:30", "03:05", "03:05"), strict=True):
        report.at = f"2026-01-01T{at}:00Z"
    done = invoke("--trial", trial.id, "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["runs"]
    shown = [(each["kind"], each["steps_completed"]) for each in found["launches"]]
    assert shown == [("start", 0), (kind, 20), (kind, 30)]
    assert found["curves"]["training/loss"]["seconds"] == [600.0, 1200.0, 1200.0 + 1800.0]


def test_all_trials_of_an_experiment_beside_a_run_of_this_machine(
    trials: list[Trial], tmp_path: Path
) -> None:
    recorded(tmp_path / "here", course(10))
    done = invoke("here", "--experiment", trials[0].experiment_id)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("report.html  (3 runs")
    page = Page((tmp_path / "report.html").read_text())
    labels = [row[0] for row in page.rows if row[0] in ("here", *(f"trial {each.id}" for each in trials))]
    assert labels[:3] == ["here", *(f"trial {each.id}" for each in trials)]


def test_how_a_trial_ended_is_said(trials: list[Trial], master: Master) -> None:
    User(master).call("POST", f"/api/v1/experiments/{trials[0].experiment_id}/cancel")
    (found,) = json.loads(invoke("--trial", trials[0].id, "--json").stdout)["runs"]
    assert (found["status"], found["reason"]) == ("stopped", "it was canceled")


@pytest.mark.parametrize("option", ["--trial", "--experiment"])
def test_what_the_master_does_not_know_is_an_error_with_a_fix(master: Master, option: str) -> None:
    done = invoke(option, 4711)
    assert done.exit_code == EXIT_CONFIG
    assert f"{option} = 4711: the master knows no such {option.strip('-')}" in done.stderr
    assert "fix: " in done.stderr


def test_a_master_that_is_not_there_is_an_error_with_a_fix(master: Master) -> None:
    done = invoke("--trial", 1, "--master", "http://127.0.0.1:1")
    assert done.exit_code == EXIT_CONFIG
    assert "the master cannot be asked" in done.stderr
    assert "DET_MASTER" in done.stderr


def test_neither_a_run_nor_a_trial_is_a_mistake() -> None:
    assert "--trial ID" in invoke().output
