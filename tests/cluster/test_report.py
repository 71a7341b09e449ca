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
from tests.cluster.master import Master
from tests.cluster.state import Checkpoint, Report, Trial, now
from tests.cluster.still import create, still_master

RATES = {"type": "categorical", "vals": [0.001, 0.002]}
CONFIG = {
    "name": "gpt2_cluster",
    "entrypoint": "python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "grid", "metric": "validation_loss", "smaller_is_better": True},
    "hyperparameters": {
        "global_batch_size": 32,
        "learning_rate": RATES,
        "fit": {"max_length": {"batches": 40}},
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
    """Two trials of a search; the first one has trained, was restarted once."""
    first, second = create(master, CONFIG).trials
    for step, value, run in ((10, 4.0, 2), (20, 3.0, 1), (20, 3.5, 2), (30, "NaN", 2)):
        metrics = {"loss": value, "samples_per_second": 100.0, "batches": step}
        first.reports.append(
            Report(group="training", steps=step, metrics=metrics, run_id=run, archived=run == 1)
        )
    first.reports.append(Report(group="validation", steps=20, metrics={"validation_loss": 3.25}, run_id=2))
    first.reports.append(Report(group="dataset", steps=20, metrics={"rows": 7}, run_id=2))
    body = {
        "uuid": "a-uuid",
        "reportTime": now(),
        "resources": {"a": 1},
        "metadata": {"steps_completed": 20},
    }
    first.checkpoints["a-uuid"] = Checkpoint(body=body)
    return [first, second]


def invoke(*words: str | int) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def shown(trial: Trial) -> Any:
    """What ``--json`` has of a trial, which is the first of its experiment, and is named with it."""
    done = invoke("--trial", trial.id, "--experiment", trial.experiment.id, "--json")
    assert done.exit_code == 0, done.output
    found, other = json.loads(done.stdout)["runs"]
    assert other["label"] == f"trial {trial.experiment.trials[1].id}"
    return found


def test_a_trial_is_shown_as_a_run_is(trials: list[Trial]) -> None:
    found = shown(trials[0])
    assert (found["label"], found["name"]) == (f"trial {trials[0].id}", "gpt2_cluster")
    assert found["status"] == "running"
    assert found["curves"]["training/loss"]["steps"] == [10, 20, 30]
    assert found["curves"]["training/loss"]["values"] == [4.0, 3.5, "NaN"]
    assert found["curves"]["dataset/rows"]["values"] == [7.0]
    assert found["best"] == {"metric": "validation_loss", "value": 3.25, "steps": 20}
    assert [(each["uuid"], each["steps_completed"]) for each in found["checkpoints"]] == [("a-uuid", 20)]
    rate = found["configuration"]["hyperparameters"]["learning_rate"]["value"]
    assert rate == str(trials[0].hparams["learning_rate"])


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
    found = shown(trial)
    starts = [(each["kind"], each["steps_completed"]) for each in found["launches"]]
    assert starts == [("start", 0), (kind, 20), (kind, 30)]
    assert found["curves"]["training/loss"]["seconds"] == [600.0, 1200.0, 1200.0 + 1800.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trial", 4711], "--trial = 4711"),
        (["--experiment", 4711], "--experiment = 4711"),
        (["--trial", 1, "--master", "http://127.0.0.1:1"], "DET_MASTER"),
    ],
)
def test_what_cannot_be_read_is_an_error_with_a_fix(
    master: Master, words: list[str | int], said: str
) -> None:
    done = invoke(*words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "fix: " in done.stderr
