"""A master that fails for a while at any one call costs no metric and no checkpoint that it had accepted."""

from __future__ import annotations

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.server import FaultKind
from tests.cluster.state import Trial

pytestmark = pytest.mark.long("a fault at every call of a trial; test_odd_masters has each kind of call")

TRIAL = r"/api/v1/trials/[0-9]+/"
ALLOCATION = r"/api/v1/allocations/[^/]+/"
# Before the trial's own processes are there. What Determined does not try again there costs a restart.
PREPARING = [
    ("GET", r"/api/v1/tasks/[^/]+/context_directory"),
    ("POST", ALLOCATION + "acceleratorData"),
    ("GET", ALLOCATION + r"resources/[^/]+/rendezvous"),
]
TRAINING = [
    ("POST", "/api/v1/runs/start"),
    ("GET", ALLOCATION + "signals/preemption"),
    ("POST", TRIAL + "runner/metadata"),
    ("POST", TRIAL + "metrics"),
    ("POST", TRIAL + "progress"),
    ("GET", "/api/v1/experiments/[0-9]+/searcher/best_searcher_validation_metric"),
    ("POST", "/api/v1/checkpoints"),
]
# What meets each trial's calls, one after the other, and the restarts that this costs.
FAULTS: list[tuple[list[FaultKind], int]] = [
    (["close", "hang"], 1),
    (["500", "close after"], len(PREPARING) + 1),
]
SHORT = (
    "resources.slots_per_trial=1",
    "hyperparameters.global_batch_size=16",
    "hyperparameters.sequence_length=16",
    "hyperparameters.fit.max_length.batches=4",
    "hyperparameters.fit.validation_period.batches=2",
    "hyperparameters.fit.checkpoint_period.batches=2",
    "hyperparameters.fit.reporting_period.batches=1",
    "data.max_validation_sequences=64",
    "max_restarts=5",
)


@pytest.fixture(scope="module")
def trials(cluster: Cluster) -> list[Trial]:
    """Two trials, each on a slot of its own; every call of theirs fails twice, in different ways."""
    created = []
    for kinds, restarts in FAULTS:
        number = cluster.create("experiments/gpt2/const.yaml", *SHORT, paused=True)
        trial = cluster.trial(number)
        faults = [
            cluster.inject(kind, method, path, seconds=0.5 if kind == "hang" else 0.0, trial=trial)
            for kind in kinds
            for method, path in [*PREPARING, *TRAINING]
        ]
        cluster.activate(number)
        created.append((trial, faults, restarts))
    for trial, faults, restarts in created:
        cluster.wait(trial.experiment_id)
        assert [fault.met for fault in faults] == [1] * len(faults)
        assert trial.restarts == restarts
    return [trial for trial, _, _ in created]


def test_a_fault_at_every_call_costs_nothing(cluster: Cluster, trials: list[Trial]) -> None:
    """Only before the trial's own processes are there may it cost a restart."""
    for trial in trials:
        assert_all_is_there(cluster, trial)
    for group in ("training", "validation"):
        assert cluster.metrics(trials[0], group) == cluster.metrics(trials[1], group)


def test_one_goes_on_and_another_starts_from_it(cluster: Cluster, trials: list[Trial]) -> None:
    """``det experiment continue`` goes on counting; an experiment that starts from a checkpoint counts anew."""
    trial, before = trials[0], trials[1]
    source = cluster.checkpoints(before)[-1].uuid
    override = f"searcher.source_checkpoint_uuid={source}"
    fork = cluster.create("experiments/gpt2/const.yaml", *SHORT, override)
    longer = "hyperparameters.fit.max_length.batches=6"
    cluster.det("experiment", "continue", str(trial.experiment_id), "--config", longer)
    cluster.wait(trial.experiment_id)
    assert [report.steps for report in trial.of_group("training")] == [1, 2, 3, 4, 5, 6]
    cluster.wait(fork)
    forked = cluster.trial(fork)
    assert [report.steps for report in forked.of_group("training")] == [1, 2, 3, 4]
    first, started_from = forked.of_group("validation")[0], before.of_group("validation")[-1]
    assert first.metrics["validation_loss"] < started_from.metrics["validation_loss"]


def assert_all_is_there(cluster: Cluster, trial: Trial) -> None:
    """Every report once, and every checkpoint, reported and stored."""
    assert [report.steps for report in trial.of_group("training")] == [1, 2, 3, 4]
    assert [report.steps for report in trial.of_group("validation")] == [2, 4]
    assert not any(report.archived for report in trial.reports)
    checkpoints = cluster.checkpoints(trial)
    assert [checkpoint.steps for checkpoint in checkpoints] == [2, 4]
    for checkpoint in checkpoints:
        assert (cluster.storage / checkpoint.uuid / "manifest.json").exists()
