"""Paused and activated by the real ``det``, a trial ends as one that never was, here as on the cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import Metrics

SHORT = (
    "hyperparameters.fit.max_length.batches=16",
    "hyperparameters.fit.validation_period.batches=8",
    "hyperparameters.fit.checkpoint_period.batches=8",
    "hyperparameters.fit.reporting_period.batches=3",
)


@pytest.mark.parametrize("config", ["experiments/gpt2/const.yaml", "experiments/gpt2/pipeline.yaml"])
def test_paused_and_activated_it_ends_as_if_it_never_was(
    cluster: Cluster, run_here: Callable[..., Metrics], config: str
) -> None:
    """The metrics are those of an uninterrupted ``det-ds run``, to the last digit."""
    number = cluster.create(config, *SHORT)
    trial = cluster.trial(number)
    cluster.wait_for_report(trial, "training", 3)
    cluster.inject("500", "POST", ".*/signals/ack_preemption")
    cluster.pause(number)
    assert (cluster.experiment(number).state, trial.state) == ("PAUSED", "PAUSED")
    assert trial.allocations[0].exit_code == 0
    assert trial.allocations[0].acked
    stopped_at = cluster.checkpoints(trial)[-1].steps
    assert 3 <= stopped_at < 16

    cluster.activate(number)
    cluster.wait(number)
    assert (trial.state, trial.run_id, trial.restarts) == ("COMPLETED", 2, 0)
    assert not trial.allocations[1].acked

    expected = run_here(config, SHORT, trial.seed)
    assert [steps for steps, _ in expected["validation"]] == [8, 16]
    for group in ("training", "validation"):
        assert cluster.metrics(trial, group) == expected[group]
    for checkpoint in cluster.checkpoints(trial):
        assert (cluster.storage / checkpoint.uuid / "manifest.json").exists()


def test_created_paused_it_waits(cluster: Cluster) -> None:
    """Nothing is started until it is activated; cancelled before that, it never is."""
    number = cluster.create("experiments/gpt2/const.yaml", paused=True)
    assert cluster.experiment(number).state == "PAUSED"
    assert not cluster.trial(number).allocations
    cluster.det("experiment", "cancel", str(number))
    assert cluster.experiment(number).state == "CANCELED"
    assert not cluster.trial(number).allocations
