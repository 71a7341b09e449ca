"""The front door: an experiment is created and followed, looked at, and its checkpoint downloaded."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.state import Trial

SHORT = (
    "hyperparameters.fit.max_length.batches=4",
    "hyperparameters.fit.validation_period.batches=2",
    "hyperparameters.fit.checkpoint_period.batches=2",
    "hyperparameters.fit.reporting_period.batches=1",
)


@pytest.fixture(scope="module")
def followed(cluster: Cluster) -> tuple[str, Trial]:
    """What ``det experiment create -f`` shows of ``const.yaml``, cut short, and its trial."""
    words = [word for override in SHORT for word in ("--config", override)]
    arguments = ["experiment", "create", "experiments/gpt2/const.yaml", ".", *words, "-f"]
    done = cluster.det(*arguments, timeout_s=240)
    return done.stdout, cluster.trial(1)


def test_it_is_followed_to_its_end(cluster: Cluster, followed: tuple[str, Trial]) -> None:
    """The log of both ranks is shown, and it ends when the trial does."""
    shown, trial = followed
    assert "Created experiment 1" in shown
    assert re.search(r"\[rank=0\] validation  batch 4/4  validation_loss [0-9.]+", shown)
    assert "Trial log stream ended" in shown
    assert cluster.wait(1).state == "COMPLETED"
    assert (trial.state, trial.restarts, trial.allocations[0].exit_code) == ("COMPLETED", 0, 0)
    assert trial.progress == 1.0
    assert [report.steps for report in trial.of_group("training")] == [1, 2, 3, 4]
    assert [report.steps for report in trial.of_group("validation")] == [2, 4]
    assert [checkpoint.steps for checkpoint in cluster.checkpoints(trial)] == [2, 4]


def test_only_the_chief_talks_to_the_master_and_no_more_than_a_report_asks_for(
    cluster: Cluster, followed: tuple[str, Trial]
) -> None:
    """Determined's ``core.init`` itself tells the master of every rank that starts; nothing else may."""
    calls = [call for call in cluster.master.server.calls if call.allocation and call.rank is not None]
    of_others = [call for call in calls if call.rank != 0]
    assert [(call.method, call.path) for call in of_others] == [("POST", "/api/v1/runs/start")]
    count = Counter(call.path.split("/")[-1] for call in calls if call.rank == 0)
    assert count["metrics"] == 4 + 2
    assert count["progress"] == 4
    assert count["best_searcher_validation_metric"] == 2
    assert count["checkpoints"] == 2
    assert count["preemption"] <= 3
    states = [call.body["state"] for call in calls if call.path.endswith("/runner/metadata")]
    assert states == ["training", *["validating", "checkpointing", "training"] * 2][: len(states)]
    assert not [call for call in cluster.master.server.calls if call.status not in (200, 404)]


def test_it_is_described_and_its_checkpoint_downloaded(
    cluster: Cluster, followed: tuple[str, Trial], tmp_path: Path
) -> None:
    """What is downloaded is the whole checkpoint, in Determined's layout."""
    _, trial = followed
    described = cluster.det("experiment", "describe", "1", "--json").stdout
    assert json.loads(described)[0]["experiment"]["state"] == "STATE_COMPLETED"
    assert "validation_loss" in cluster.det("trial", "describe", str(trial.id), "--json").stdout
    assert "COMPLETED" in cluster.det("experiment", "list").stdout
    assert "[rank=0]" in cluster.det("trial", "logs", str(trial.id)).stdout
    assert cluster.det("experiment", "wait", "1").returncode == 0
    last = cluster.checkpoints(trial)[-1]
    assert last.uuid in cluster.det("experiment", "list-checkpoints", "1").stdout
    cluster.det("checkpoint", "download", last.uuid, "-o", tmp_path / "got")
    stored = cluster.storage / last.uuid
    names = sorted(path.relative_to(stored) for path in stored.rglob("*"))
    assert names == sorted(path.relative_to(tmp_path / "got") for path in (tmp_path / "got").rglob("*"))
    assert json.loads((tmp_path / "got/metadata.json").read_text())["steps_completed"] == 4


def test_it_goes_on_and_another_starts_from_it(cluster: Cluster, followed: tuple[str, Trial]) -> None:
    """``det experiment continue`` goes on counting; an experiment that starts from a checkpoint counts anew."""
    _, trial = followed
    longer = "hyperparameters.fit.max_length.batches=6"
    cluster.det("experiment", "continue", "1", "--config", longer)
    last = cluster.checkpoints(trial)[-1]
    fork = cluster.create(
        "experiments/gpt2/const.yaml", *SHORT, f"searcher.source_checkpoint_uuid={last.uuid}"
    )
    cluster.wait(1)
    assert [report.steps for report in trial.of_group("training")] == [1, 2, 3, 4, 5, 6]
    cluster.wait(fork)
    forked = cluster.trial(fork)
    assert [report.steps for report in forked.of_group("training")] == [1, 2, 3, 4]
    first, started_from = forked.of_group("validation")[0], trial.of_group("validation")[1]
    assert first.metrics["validation_loss"] < started_from.metrics["validation_loss"]
