"""Paused and activated by the real ``det``, a pipeline ends as one that never was, here as on the cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere

PIPELINE = "experiments/gpt2/pipeline.yaml"


@pytest.mark.long("the same with a pipeline; test_follow pauses and activates")
def test_paused_and_activated_it_ends_as_if_it_never_was(
    cluster: Cluster, run_here: Callable[[str], RunHere]
) -> None:
    """The metrics are those of an uninterrupted ``det-ds run``, to the last digit; ``test_follow`` has the other."""
    number = cluster.create(PIPELINE, *SHORT, paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 1)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 2)
    cluster.pause(number, held)
    assert (cluster.experiment(number).state, trial.state) == ("PAUSED", "PAUSED")
    assert trial.allocations[0].exit_code == 0
    assert trial.allocations[0].acked
    stopped_at = cluster.checkpoints(trial)[-1].steps
    assert 2 < stopped_at < 5

    cluster.activate(number)
    expected = run_here(PIPELINE).metrics
    cluster.wait(number)
    assert (trial.state, trial.run_id, trial.restarts) == ("COMPLETED", 2, 0)
    assert not trial.allocations[1].acked
    assert [steps for steps, _ in expected["validation"]] == [5, 10]
    for group in ("training", "validation"):
        assert cluster.metrics(trial, group) == expected[group]
    for checkpoint in cluster.checkpoints(trial):
        assert (cluster.storage / checkpoint.uuid / "manifest.json").exists()


def test_created_paused_it_waits(cluster: Cluster) -> None:
    """Nothing is started until it is activated; cancelled before that, it never is."""
    number = cluster.create(PIPELINE, paused=True)
    assert cluster.experiment(number).state == "PAUSED"
    assert not cluster.trial(number).allocations
    cluster.det("experiment", "cancel", str(number))
    assert cluster.experiment(number).state == "CANCELED"
    assert not cluster.trial(number).allocations
