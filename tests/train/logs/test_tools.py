"""W&B and MLflow show the same numbers at the same steps; a resumed run is one run; training waits for neither."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.command import ROOT, det_ds
from tests.interrupted.experiments import experiment
from tests.package import checkpoints, records
from tests.train.logs.reading import (
    mlflow_points,
    mlflow_runs,
    points_of,
    serving_mlflow,
    wandb_runs,
)

KEY = "0123456789abcdef0123456789abcdef01234567"
LOSS, VALIDATION = "training/loss", "validation/validation_loss"


def run(folder: Path, tools: dict[str, Any], *words: str, length: int = 9) -> Any:
    """``det-ds run`` of a trial that reports and validates, with its output."""
    config = experiment(zero=1)
    config["labels"] = ["one", "two"]
    config["resources"]["slots_per_trial"] = 1
    config["hyperparameters"]["logging"] = tools
    config["hyperparameters"]["fit"]["max_length"] = {"batches": length}
    config["hyperparameters"]["fit"]["reporting_period"] = {"batches": 1}
    (folder / "own.yaml").write_text(yaml.safe_dump(config))
    done = det_ds(
        *("run", folder / "own.yaml", ROOT, "--run-dir", folder / "run", *words), env={"WANDB_API_KEY": KEY}
    )
    assert done.returncode == 0, done.stderr
    return done


def numbers(run_dir: Path, group: str, name: str) -> list[tuple[int, Any]]:
    """A metric as ``metrics.jsonl`` has it."""
    return [(step, pytest.approx(report[name])) for step, report in records(run_dir, group)]


def test_a_resumed_run_is_one_run_whose_batches_are_its_steps(tmp_path: Path) -> None:
    """The second start goes on from a batch before the last of the first."""
    run_dir = tmp_path / "run"
    with serving_mlflow(tmp_path) as url:
        tools = {"wandb": {"mode": "offline", "tags": ["mine"]}, "mlflow": {"tracking_uri": url}}
        run(tmp_path, tools)
        first = {LOSS: numbers(run_dir, "training", "loss")}
        first[VALIDATION] = numbers(run_dir, "validation", "validation_loss")
        (at_six,) = [
            path
            for path in checkpoints(run_dir)
            if json.loads((path / "metadata.json").read_text())["steps_completed"] == 6
        ]
        run(tmp_path, tools, "--resume", at_six.name, length=12)
        whole = {LOSS: numbers(run_dir, "training", "loss")}
        whole[VALIDATION] = numbers(run_dir, "validation", "validation_loss")
        client, (there,) = mlflow_runs(url, "victim")
        for name in (LOSS, VALIDATION):
            again = [point for point in whole[name] if point[0] > 6]
            assert mlflow_points(client, there, name) == first[name] + again
        assert there.info.status == "FINISHED"
        assert there.data.tags["determined_ds.continued_from_batch"] == "6"
        assert there.data.params["deepspeed.zero_optimization.stage"] == "1"

    before, after = wandb_runs(run_dir)
    assert before["id"] == after["id"]
    for started, points in ((before, first), (after, {name: whole[name] for name in whole})):
        assert (started["project"], started["tags"]) == ("victim", ["one", "two", "mine"])
        assert started["config"]["deepspeed"]["zero_optimization"]["stage"] == 1
        assert started["exit_code"] == 0
        for name in (LOSS, VALIDATION):
            shown = points_of(started["rows"], name, "batches")
            assert shown == points_of(started["rows"], name, "_step")
            assert shown == [point for point in points[name] if started is before or point[0] > 6]
    for file in run_dir.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


@pytest.mark.long("waits as long as the clients do; the numbers that they show are short")
@pytest.mark.parametrize(
    "answers", [False, pytest.param(True, marks=pytest.mark.long("one that does not answer takes as little"))]
)
def test_a_server_that_takes_nothing_is_warned_of_and_costs_no_training(
    answers: bool, tmp_path: Path
) -> None:
    """One that accepts connections and never answers, and a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        port = server.getsockname()[1] if answers else 9  # discard
        done = run(tmp_path, {"mlflow": {"tracking_uri": f"http://127.0.0.1:{port}"}})
    assert [step for step, _ in records(tmp_path / "run", "training")] == list(range(1, 10))
    assert "MLflow has not taken" in done.stderr + done.stdout
