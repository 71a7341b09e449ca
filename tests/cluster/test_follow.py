"""The front door: an experiment is created and followed, paused and activated meanwhile, looked at and downloaded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from determined_ds import load_model_from_checkpoint_path
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere
from tests.cluster.state import Experiment, Trial
from tests.command import ROOT

pytestmark = pytest.mark.programs
CONST = "experiments/gpt2/const.yaml"


@dataclass(frozen=True, kw_only=True)
class Followed:
    """An experiment that was followed to its end.

    Args:
        experiment: As the master knows it.
        trial: Its trial.
        shown: What ``det experiment create -f`` has shown.
        stopped_at: The batch at which it was paused.
        here: The same without a cluster, and never paused.
    """

    experiment: Experiment
    trial: Trial
    shown: str
    stopped_at: int
    here: RunHere


@pytest.fixture(scope="module")
def followed(cluster: Cluster, run_here: Callable[[str], RunHere]) -> Followed:
    """``const.yaml``, cut short; paused at its first report, while its log is followed, and activated."""
    words = [word for override in SHORT for word in ("--config", override)]
    with ThreadPoolExecutor(1) as pool:
        number = len(cluster.master.experiments) + 1
        following = pool.submit(
            cluster.det, "experiment", "create", CONST, ".", *words, "-f", timeout_s=900.0
        )
        cluster.wait_for(lambda: number in cluster.master.experiments)
        trial = cluster.trial(number)
        held = cluster.hold_at_report(trial, 1)
        cluster.wait_for_report(trial, "training", 2)
        cluster.inject("500", "POST", ".*/signals/ack_preemption")
        cluster.pause(number, held)
        assert (cluster.experiment(number).state, trial.state) == ("PAUSED", "PAUSED")
        stopped_at = cluster.checkpoints(trial)[-1].steps
        cluster.activate(number)
        here = run_here(CONST)
        experiment = cluster.wait(number)
        shown = following.result(timeout=60).stdout
    return Followed(experiment=experiment, trial=trial, shown=shown, stopped_at=stopped_at, here=here)


def test_it_is_followed_to_its_end(followed: Followed) -> None:
    """The log of both runs is shown, and it ends when the trial does."""
    assert f"Created experiment {followed.experiment.id}\n" in followed.shown
    assert f"stopped     batch {followed.stopped_at} of 10, as requested" in followed.shown
    assert f"resumed at batch {followed.stopped_at} of 10" in followed.shown
    assert re.search(r"\[rank=0\] validation  batch 10/10  validation_loss [0-9.]+", followed.shown)
    assert "Trial log stream ended" in followed.shown


def test_paused_and_activated_it_ends_as_if_it_never_was(cluster: Cluster, followed: Followed) -> None:
    """The metrics are those of an uninterrupted ``det-ds run``, to the last digit; see also ``test_pause``."""
    trial = followed.trial
    assert (trial.state, trial.run_id, trial.restarts, trial.progress) == ("COMPLETED", 2, 0, 1.0)
    assert [allocation.exit_code for allocation in trial.allocations] == [0, 0]
    assert [allocation.acked for allocation in trial.allocations] == [True, False]
    assert trial.seed == followed.here.seed == 441365315  # as a real master's database had it
    assert 2 < followed.stopped_at < 5
    assert [steps for steps, _ in followed.here.metrics["training"]] == [2, 4, 6, 8, 10]
    assert [steps for steps, _ in followed.here.metrics["validation"]] == [5, 10]
    for group in ("training", "validation"):
        assert cluster.metrics(trial, group) == followed.here.metrics[group]
    assert [checkpoint.steps for checkpoint in cluster.checkpoints(trial)] == [followed.stopped_at, 5, 10]


def test_only_the_chief_talks_to_the_master_and_no_more_than_a_report_asks_for(
    cluster: Cluster, followed: Followed
) -> None:
    """Determined's ``core.init`` itself tells the master of every rank that starts; nothing else may."""
    allocation = followed.trial.allocations[1].id
    calls = [call for call in cluster.calls(None, ".*", allocation=allocation) if call.rank is not None]
    of_others = [call for call in calls if call.rank != 0]
    assert [(call.method, call.path) for call in of_others] == [("POST", "/api/v1/runs/start")]
    count = Counter(call.path.split("/")[-1] for call in calls if call.rank == 0)
    num_reports = len([steps for steps in (2, 4, 6, 8, 10) if steps > followed.stopped_at])
    assert count["metrics"] == num_reports + 2
    assert count["progress"] == num_reports
    assert count["best_searcher_validation_metric"] == 2
    assert count["checkpoints"] == 2
    assert count["preemption"] <= 3
    assert count[str(followed.trial.id)] == 0  # its searcher, ``single``, stops no trial
    states = [call.body["state"] for call in calls if call.path.endswith("/runner/metadata")]
    assert states == ["training", *["validating", "checkpointing", "training"] * 2][: len(states)]
    assert not [call for call in calls if call.status not in (200, 404, None)]


def test_it_is_described(cluster: Cluster, followed: Followed) -> None:
    number, trial = followed.experiment.id, followed.trial
    described = cluster.det("experiment", "describe", str(number), "--json").stdout
    assert json.loads(described)[0]["experiment"]["state"] == "STATE_COMPLETED"
    assert "validation_loss" in cluster.det("trial", "describe", str(trial.id), "--json").stdout
    assert "COMPLETED" in cluster.det("experiment", "list").stdout
    assert "[rank=0]" in cluster.det("trial", "logs", str(trial.id)).stdout
    assert cluster.det("experiment", "wait", str(number)).returncode == 0
    listed = cluster.det("experiment", "list-checkpoints", str(number)).stdout
    assert all(checkpoint.uuid in listed for checkpoint in cluster.checkpoints(trial))


def test_its_checkpoint_is_downloaded_and_its_model_loaded(
    cluster: Cluster, followed: Followed, tmp_path: Path
) -> None:
    """``det checkpoint download`` gives the files of a run without a cluster, the code besides, and the same model."""
    got = tmp_path / "got"
    cluster.det("checkpoint", "download", cluster.checkpoints(followed.trial)[-1].uuid, "-o", got)
    [here] = [path for path in checkpoints_of(followed.here.run_dir) if steps_of(path) == 10]
    assert [path for path in files_in(got) if path.parts[0] != "code"] == files_in(here)
    assert steps_of(got) == 10
    model = load_model_from_checkpoint_path(got, context_dir=ROOT).state_dict()
    same = load_model_from_checkpoint_path(here, context_dir=ROOT).state_dict()
    assert model.keys() == same.keys()
    assert all(torch.equal(model[name], same[name]) for name in model)


def checkpoints_of(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / "checkpoints").iterdir() if path.is_dir()]


def steps_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "metadata.json").read_text())["steps_completed"])


def files_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
