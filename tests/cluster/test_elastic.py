"""A trial that is continued with other slots, under another strategy, trains what it would have trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere

CONST = "experiments/gpt2/const.yaml"  # without dropout, of which each replica draws its own


@pytest.mark.long("a cluster; cli/test_elastic has the same by det-ds run")
def test_a_canceled_trial_is_continued_on_one_slot_under_zero_3(
    cluster: Cluster, run_here: Callable[[str], RunHere]
) -> None:
    number = cluster.create(CONST, *SHORT, paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 3)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 6)
    cluster.det("experiment", "cancel", str(number))
    held.set()
    cluster.wait(number, "CANCELED")
    stage = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=3"
    slots = "resources.slots_per_trial=1"
    cluster.det("experiment", "continue", str(number), "--config", slots, "--config", stage)
    cluster.wait(number)
    found = {report.steps: report.metrics["loss"] for report in trial.of_group("training")}
    expected = {steps: metrics["loss"] for steps, metrics in run_here(CONST).metrics["training"]}
    assert found == pytest.approx(expected, rel=1e-5)
    assert "1 replica, ZeRO 3" in cluster.log(trial)
    assert "elastic     2 ranks (2 replicas, deepspeed) -> 1 rank (1 replica, deepspeed)" in cluster.log(
        trial
    )
