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
from tests.cluster.master import create, still_master
from tests.cluster.state import Checkpoint, Report, Trial, now

CONFIG = {
    "name": "gpt2_cluster",
    "entrypoint": "python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "grid", "metric": "validation_loss", "smaller_is_better": True},
    "hyperparameters": {
        "global_batch_size": 32,
        "learning_rate": {"type": "categorical", "vals": [0.001, 0.002]},
        "fit": {"max_length": {"batches": 40}},
    },
}
# Group, batch, metric, value, run, and when it was reported, of a day.
REPORTS = [
    ("training", 10, "loss", 4.0, 2, "01:10"),
    ("training", 20, "loss", 3.0, 1, "01:20"),
    ("training", 20, "loss", 3.5, 2, "01:20"),
    ("training", 30, "loss", "NaN", 2, "02:30"),
    ("validation", 20, "validation_loss", 3.25, 2, "03:05"),
    ("dataset", 20, "rows", 7, 2, "03:05"),
]


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    """The first of two trials of a search; it was started three times, once of them as a restart."""
    monkeypatch.setenv("HOME", str(tmp_path))  # the client keeps who is logged in there
    monkeypatch.chdir(tmp_path)
    with still_master() as master:
        monkeypatch.setenv("DET_MASTER", master.server.url)
        found, _ = create(master, CONFIG).trials
        for group, steps, name, value, run, at in REPORTS:
            how = {"run_id": run, "archived": run == 1, "at": f"2026-01-01T{at}:00Z"}
            found.reports.append(Report(group=group, steps=steps, metrics={name: value}, **how))
        made = {"uuid": "a-uuid", "reportTime": now(), "resources": {"a": 1}}
        found.checkpoints["a-uuid"] = Checkpoint(body={**made, "metadata": {"steps_completed": 20}})
        [first], found.restarts = found.allocations, 1
        found.allocations = [
            replace(first, id=f"{found.task_id}.{number}", start_time=f"2026-01-01T0{number}:00:00.719")
            for number in (1, 2, 3)
        ]
        yield found


def invoke(*words: str | int) -> Any:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_a_trial_is_shown_as_a_run_is_with_each_start_of_its_containers(trial: Trial) -> None:
    """It is named with its experiment; what its first run said is overtaken, and pauses are no time of training."""
    done = invoke("--trial", trial.id, "--experiment", trial.experiment.id, "--json")
    assert done.exit_code == 0, done.output
    found, other = json.loads(done.stdout)["runs"]
    assert other["label"] == f"trial {trial.experiment.trials[1].id}"
    assert (found["label"], found["name"]) == (f"trial {trial.id}", "gpt2_cluster")
    assert found["status"] == "running"
    losses = found["curves"]["training/loss"]
    assert (losses["steps"], losses["values"]) == ([10, 20, 30], [4.0, 3.5, "NaN"])
    assert losses["seconds"] == [600.0, 1200.0, 1200.0 + 1800.0]
    assert found["curves"]["dataset/rows"]["values"] == [7.0]
    assert found["best"] == {"metric": "validation_loss", "value": 3.25, "steps": 20}
    assert [(each["uuid"], each["steps_completed"]) for each in found["checkpoints"]] == [("a-uuid", 20)]
    rate = found["configuration"]["hyperparameters"]["learning_rate"]["value"]
    assert rate == str(trial.hparams["learning_rate"])
    starts = [(each["kind"], each["steps_completed"]) for each in found["launches"]]
    assert starts == [("start", 0), ("restart or resume", 20), ("restart or resume", 30)]
