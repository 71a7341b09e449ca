"""A run without a cluster, reported to a master by the real ``core_v2``: the numbers of its run directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.master import Master
from tests.cluster.still import still_master
from tests.harness.command import ROOT, det_ds, det_ds_program
from tests.package import checkpoints

OWN_MODEL = ROOT / "tests/cli/own_model"
# One rank of torchrun's; another launcher's is the same from there on.
RANK = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
LENGTH = "hyperparameters.fit.max_length.batches"


@pytest.fixture
def master() -> Iterator[Master]:
    with still_master() as made:
        yield made


def run(
    run_dir: Path, master: str, *words: str, env: dict[str, str] | None = None, folder: Path = OWN_MODEL
) -> Any:
    environment = {
        **(env or {}),
        "HOME": str(run_dir.parent),
        "DET_MASTER": master,
    }  # who is logged in is kept there
    start = det_ds_program if env else det_ds  # a rank starts itself anew, as a program
    [config] = folder.glob("*.yaml")
    return start("run", config, folder, "--run-dir", run_dir, *words, env=environment)


def assert_all_is_told(master: Master, run_dir: Path) -> None:
    """Of the only trial: the metrics of its run directory, and its checkpoints, with no folder beside them."""
    [trial] = master.trials.values()
    assert (trial.state, trial.progress) == ("COMPLETED", 1.0)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = [(each.group, each.steps, each.metrics) for each in trial.reports if not each.archived]
    kept = [(each["group"], each["steps_completed"], each["metrics"]) for each in records]
    assert sorted(told, key=lambda each: each[:2]) == sorted(kept, key=lambda each: each[:2])
    assert {found.uuid for found in trial.complete} == {
        checkpoint.name for checkpoint in checkpoints(run_dir)
    }


def test_a_run_is_reported_and_a_rank_of_a_launcher_that_resumes_it_goes_on_there(
    master: Master, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    first = run(run_dir, master.server.url, "--set", f"{LENGTH}=4", "--slots", "1", "--report-to-master")
    assert first.returncode == 0, first.stderr
    assert f"reported to {master.server.url}/det/experiments/1" in first.stdout
    again = run(run_dir, master.server.url, "--set", f"{LENGTH}=6", "--resume", env=RANK)
    assert again.returncode == 0, again.stderr
    assert_all_is_told(master, run_dir)
    [trial] = master.trials.values()
    assert (trial.run_id, trial.hparams["global_batch_size"]) == (2, 8)
    experiment = master.experiments[1]
    assert (experiment.config["name"], experiment.config["searcher"]["metric"]) == ("tiny", "validation_loss")


def test_a_master_that_cannot_be_reached_is_one_warning(tmp_path: Path) -> None:
    done = run(tmp_path / "run", "http://127.0.0.1:1", "--set", f"{LENGTH}=2", "--report-to-master")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not reported to the master") == 1
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "completed"


def test_our_own_launcher_reports_only_where_it_is_asked_to(master: Master, tmp_path: Path) -> None:
    words = ["--set", f"{LENGTH}=2", "--slots", "1"]
    assert run(tmp_path / "quiet", master.server.url, *words).returncode == 0
    assert not master.trials
    nowhere = run(tmp_path / "nowhere", "", *words, "--report-to-master")
    assert nowhere.returncode == 2
    assert "DET_MASTER is not set" in nowhere.stderr


def test_a_script_is_reported_though_it_finds_the_trial_of_a_cluster(master: Master, tmp_path: Path) -> None:
    folder = ROOT / "tests/cli/own_script"
    done = run(tmp_path / "run", master.server.url, "--report-to-master", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "is not reported" not in done.stderr
    assert_all_is_told(master, tmp_path / "run")
