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
from tests.cluster.cluster import Cluster, FakeCluster, Trial, metrics_of
from tests.cluster.scenarios import CONST, LENGTH, LONG_ENOUGH, SAVED_EVERY
from tests.harness.command import ROOT

pytestmark = pytest.mark.programs


@dataclass(frozen=True, kw_only=True)
class Followed:
    """An experiment whose log was followed to its end."""

    number: int
    trial: Trial
    shown: str  # by ``det trial logs -f``
    stopped_at: int  # the batch at which it was paused
    here: Path  # the run directory of the same without a cluster, and never paused


@pytest.fixture(scope="module")
def followed(cluster: Cluster, run_here: Callable[..., Path]) -> Followed:
    """``const.yaml``, cut short; paused at its first report, while its log is followed, and activated."""
    number = cluster.create(CONST, *LONG_ENOUGH, paused=True)
    trial = cluster.trial(number)
    assert (trial.state.name, cluster.starts(trial)) == ("PAUSED", [])
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(cluster.det, "trial", "logs", "-f", trial.id)
        if isinstance(cluster, FakeCluster):
            cluster.inject("answer", "POST", ".*/signals/ack_preemption", status=500)
        stopped_at = cluster.stop(number, at=2)
        cluster.activate(number)
        here = run_here(CONST, *LONG_ENOUGH)
        [trial] = cluster.wait(number)
        shown = following.result(timeout=60).stdout
    return Followed(number=number, trial=trial, shown=shown, stopped_at=stopped_at, here=here)


def test_it_is_followed_to_its_end(followed: Followed) -> None:
    """The log of both runs is shown, and it ends when the trial does."""
    assert f"stopped     batch {followed.stopped_at} of {LENGTH}, as requested" in followed.shown
    assert f"resumed at batch {followed.stopped_at} of {LENGTH}" in followed.shown
    end = rf"\[rank=0\].* validation  batch {LENGTH}/{LENGTH}  validation_loss [0-9.]+"
    assert re.search(end, followed.shown)


def test_paused_and_activated_it_ends_as_if_it_never_was(cluster: Cluster, followed: Followed) -> None:
    """The metrics are those of an uninterrupted ``det-ds run``, to the last digit; see also ``test_interrupted``."""
    trial, here = followed.trial, metrics_of(followed.here)
    assert (trial.state.name, trial.restarts, trial.totalBatchesProcessed) == ("COMPLETED", 0, LENGTH)
    assert cluster.experiment(followed.number).progress == 1.0
    assert len(cluster.starts(trial)) == 2
    assert [steps for steps, _ in here["training"]] == list(range(2, LENGTH + 1, 2))
    assert cluster.metrics(trial) == here
    for _, metrics in (*cluster.reports(trial, "training"), *cluster.reports(trial, "validation")):
        assert "epochs" not in metrics  # which would always be 0, and the first chart of the web UI
        assert all(isinstance(value, (int, float)) for value in metrics.values()), "a list is an empty chart"
    saved = {checkpoint.batch for checkpoint in cluster.checkpoints(trial)}
    # A real master deletes the one in the middle, which is neither the best nor the last, some time after the end.
    assert {followed.stopped_at, LENGTH} <= saved
    assert all(batch % SAVED_EVERY == 0 for batch in saved - {followed.stopped_at})
    result = json.loads((followed.here / "result.json").read_text())
    assert result["trial_seed"] == 441365315  # as a real master's database had it


def test_only_the_chief_talks_to_the_master_and_no_more_than_a_report_asks_for(
    fake: FakeCluster, followed: Followed
) -> None:
    """Determined's ``core.init`` itself tells the master of every rank that starts; nothing else may."""
    kept = fake.kept(followed.trial)
    assert kept.seed == 441365315
    assert [allocation.acked for allocation in kept.allocations] == [True, False]
    calls = [each for each in fake.calls(".*", allocation=kept.allocations[1].id) if each.rank is not None]
    of_others = [call for call in calls if call.rank != 0]
    assert [(call.method, call.path) for call in of_others] == [("POST", "/api/v1/runs/start")]
    count = Counter(call.path.split("/")[-1] for call in calls if call.rank == 0)
    rest = range(followed.stopped_at + 1, LENGTH + 1)
    validations, saves = (
        {step for step in rest if step % every == 0} for every in (LENGTH // 2, SAVED_EVERY)
    )
    num_reports = len([step for step in rest if step % 2 == 0])
    assert count["metrics"] == num_reports + len(validations)
    assert count["progress"] == num_reports
    assert count["best_searcher_validation_metric"] == len(validations)
    assert count["checkpoints"] == len(saves)
    assert count["preemption"] <= 3
    assert count[str(followed.trial.id)] == 0  # its searcher, ``single``, stops no trial
    states = [call.body["state"] for call in calls if call.path.endswith("/runner/metadata")]
    expected = ["training"]
    for step in rest:
        expected += ["validating"] * (step in validations) + ["checkpointing"] * (step in saves)
        expected += ["training"] * (step in saves)
    assert states == expected[: len(states)]
    assert not [call for call in calls if call.status not in (200, 404, None)]


def test_its_checkpoint_is_downloaded_and_its_model_loaded(
    cluster: Cluster, followed: Followed, tmp_path: Path
) -> None:
    """``det checkpoint download`` gives the files of a run without a cluster, the code besides, and the same model."""
    got = tmp_path / "got"
    cluster.det("checkpoint", "download", cluster.checkpoints(followed.trial)[-1].uuid, "-o", got)
    saved = (followed.here / "checkpoints").iterdir()
    [here] = [path for path in saved if path.is_dir() and steps_of(path) == LENGTH]
    assert [path for path in files_in(got) if path.parts[0] != "code"] == files_in(here)
    assert steps_of(got) == LENGTH
    model = load_model_from_checkpoint_path(got, context_dir=ROOT).state_dict()
    same = load_model_from_checkpoint_path(here, context_dir=ROOT).state_dict()
    assert model.keys() == same.keys()
    assert all(torch.equal(model[name], same[name]) for name in model)


def steps_of(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "metadata.json").read_text())["steps_completed"])


def files_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
