"""A paused trial is one run in every view: ``det-ds report``, the files of tools and the traces in its storage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.cluster.cluster import Cluster, FakeCluster, Trial, best_of
from tests.cluster.scenarios import CONST, LENGTH, LONG_ENOUGH
from tests.harness.command import det_ds
from tests.logs.reading import points_of, wandb_runs

pytestmark = pytest.mark.long(
    "each is tested without a cluster: report, logs, profile; test_report has the page"
)
SEEN = (
    *LONG_ENOUGH,
    "hyperparameters.fit.profile={wait: 1, warmup: 1, active: 2}",
    "hyperparameters.logging={wandb: {mode: offline}}",
)


def files_of(cluster: Cluster, number: int, trial: Trial) -> Path:
    """The files for TensorBoard of a trial, and what lies beside them."""
    storage = cluster.experiment(number).config["checkpoint_storage"]
    folder = Path(storage.get("host_path") or "/nowhere", storage.get("storage_path") or "")
    found = list(folder.glob(f"*/tensorboard/experiment/{number}/trial/{trial.id}"))
    if not found:
        pytest.skip(f"the cluster's storage is not on this machine: {storage}")
    return found[0]


def test_a_paused_trial_is_one_run_in_every_view(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = cluster.create(CONST, *SEEN, paused=True)
    paused_at = cluster.stop(number, at=6)
    cluster.activate(number)
    [trial] = cluster.wait(number)
    losses = [(steps, metrics["loss"]) for steps, metrics in cluster.reports(trial, "training")]

    if isinstance(cluster, FakeCluster):
        monkeypatch.setenv("HOME", str(tmp_path))  # the client keeps who is logged in there
        monkeypatch.setenv("DET_MASTER", cluster.master.server.here)
    done = CliRunner().invoke(main, ["report", "--trial", str(trial.id), "--json"])
    assert done.exit_code == 0, done.output
    [shown] = json.loads(done.stdout)["runs"]
    curve = shown["curves"]["training/loss"]
    assert list(zip(curve["steps"], curve["values"], strict=True)) == losses
    assert [launch["kind"] for launch in shown["launches"]] == ["start", "resume"]
    assert paused_at - 1 <= shown["launches"][1]["steps_completed"] < LENGTH
    assert shown["best"]["value"] == best_of(trial)["validation_loss"]

    there = files_of(cluster, number, trial)
    runs = wandb_runs(there / "tools")
    assert len({run["id"] for run in runs}) == 1
    assert [run["summary"]["status"] for run in runs] == ["stopped", "completed"]
    assert [point for run in runs for point in points_of(run["rows"], "training/loss", "batches")] == losses
    profiled = det_ds("profile", there / "profile", "--json")
    assert profiled.returncode == 0, profiled.stderr
    assert len(json.loads(profiled.stdout)["ranks"]) == 2
