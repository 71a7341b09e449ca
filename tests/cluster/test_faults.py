"""A master that fails for a while at any one call costs no metric and no checkpoint that it had accepted."""

from __future__ import annotations

from tests.cluster.cluster import Cluster
from tests.cluster.server import Fault, FaultKind
from tests.cluster.state import Trial

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
RESTARTS: dict[FaultKind, int] = {"close after": 1, "500": len(PREPARING), "hang": 0, "close": 1}
SHORT = (
    "resources.slots_per_trial=1",
    "hyperparameters.global_batch_size=16",
    "hyperparameters.sequence_length=16",
    "hyperparameters.fit.max_length.batches=4",
    "hyperparameters.fit.validation_period.batches=2",
    "hyperparameters.fit.checkpoint_period.batches=2",
    "hyperparameters.fit.reporting_period.batches=1",
    "max_restarts=3",
)


def test_a_fault_at_every_call_costs_nothing(cluster: Cluster) -> None:
    """Each call of a trial fails once, in each of four ways. Only before its own processes are there may that cost
    a restart."""
    trials: dict[FaultKind, Trial] = {}
    faults: dict[FaultKind, list[Fault]] = {}
    for kind in RESTARTS:
        number = cluster.create("experiments/gpt2/const.yaml", *SHORT, paused=True)
        trial = trials[kind] = cluster.trial(number)
        faults[kind] = [
            cluster.inject(kind, method, path, seconds=1.0 if kind == "hang" else 0.0, trial=trial)
            for method, path in [*PREPARING, *TRAINING]
        ]
        cluster.activate(number)
    for kind, trial in trials.items():
        cluster.wait(trial.experiment_id)
        assert [fault.met for fault in faults[kind]] == [1] * len(faults[kind]), kind
        assert trial.restarts == RESTARTS[kind]
        assert_all_is_there(cluster, trial)
        for group in ("training", "validation"):
            assert cluster.metrics(trial, group) == cluster.metrics(trials["hang"], group)


def assert_all_is_there(cluster: Cluster, trial: Trial) -> None:
    """Every report once, and every checkpoint, reported and stored."""
    assert [report.steps for report in trial.of_group("training")] == [1, 2, 3, 4]
    assert [report.steps for report in trial.of_group("validation")] == [2, 4]
    assert not any(report.archived for report in trial.reports)
    checkpoints = cluster.checkpoints(trial)
    assert [checkpoint.steps for checkpoint in checkpoints] == [2, 4]
    for checkpoint in checkpoints:
        assert (cluster.storage / checkpoint.uuid / "manifest.json").exists()
