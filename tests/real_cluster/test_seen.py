"""What is seen of a trial afterwards: ``det-ds report --trial``, the files of tools and traces in its storage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.profile.analysis import analyse
from determined_ds.protocol.profile_files import traces_in
from tests.real_cluster.client import Json, RealCluster
from tests.real_cluster.conftest import TINY
from tests.runtime.logs.reading import csv_rows, points_of, wandb_runs

CONST = "experiments/gpt2/const.yaml"
SEEN = (
    *TINY,
    "hyperparameters.fit.max_length.batches=40",
    "hyperparameters.fit.breakdown=true",
    "hyperparameters.fit.profile={wait: 1, warmup: 1, active: 2}",
    "hyperparameters.logging={csv: {}, wandb: {mode: offline}}",
)


def files_of(cluster: RealCluster, number: int, trial: Json) -> Path:
    """The files for TensorBoard of a trial, and what lies beside them."""
    storage = cluster.experiment(number)["config"]["checkpoint_storage"]
    folder = Path(storage.get("host_path") or "/nowhere", storage.get("storage_path") or "")
    found = list(folder.glob(f"*/tensorboard/experiment/{number}/trial/{trial['id']}"))
    if not found:
        pytest.skip(f"the cluster's storage is not on this machine: {storage}")
    return found[0]


def test_a_paused_trial_is_one_run_in_every_view(cluster: RealCluster) -> None:
    number = cluster.create(CONST, *SEEN)
    cluster.wait_for_report(cluster.trial(number), 8)
    cluster.pause(number)
    cluster.det("experiment", "activate", str(number))
    [trial] = cluster.wait(number)
    paused_at = cluster.checkpoints(trial)[0]["metadata"]["steps_completed"]
    losses = [(steps, metrics["loss"]) for steps, metrics in cluster.metrics(trial)["training"]]

    done = CliRunner().invoke(main, ["report", "--trial", str(trial["id"]), "--json"])
    assert done.exit_code == 0, done.output
    [shown] = json.loads(done.stdout)["runs"]
    parts = {f"training/{name}" for name in ("memory_allocated_gb", "communication_s", "grad_norm")}
    assert parts <= shown["curves"].keys()
    curve = shown["curves"]["training/loss"]
    assert list(zip(curve["steps"], curve["values"], strict=True)) == losses
    assert [launch["kind"] for launch in shown["launches"]] == ["start", "resume"]
    assert paused_at <= shown["launches"][1]["steps_completed"] < 40
    assert shown["best"]["value"] == trial["bestValidation"]["metrics"]["avgMetrics"]["validation_loss"]

    there = files_of(cluster, number, trial)
    written = [csv_rows(there / "tools" / name) for name in ("metrics.csv", "metrics-2.csv")]
    assert [point for rows in written for point in points_of(rows, "training/loss", "batches")] == losses
    assert written[1][-1]["validation/validation_loss"]  # the very last report
    runs = wandb_runs(there / "tools")
    assert len({run["id"] for run in runs}) == 1
    assert [run["summary"]["status"] for run in runs] == ["stopped", "completed"]
    assert [each for run in runs for each in points_of(run["rows"], "training/loss", "batches")] == losses
    assert len(analyse(traces_in(there / "profile")).ranks) == trial_slots(cluster, number)


def trial_slots(cluster: RealCluster, number: int) -> int:
    """Slots of each trial of an experiment."""
    return int(cluster.experiment(number)["config"]["resources"]["slots_per_trial"])
