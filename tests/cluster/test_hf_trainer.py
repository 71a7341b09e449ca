"""A script of transformers' Trainer, paused and activated by the real ``det``, ends as one that never was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere

pytestmark = pytest.mark.programs
SCRIPT = "experiments/hf_trainer/const.yaml"


@pytest.mark.long(
    "a whole training; transformers/test_resume stops and resumes one, test_session pauses a script"
)
def test_paused_and_activated_it_ends_as_if_it_never_was(
    cluster: Cluster, run_here: Callable[[str], RunHere]
) -> None:
    """Evaluations and checkpoints are those of an uninterrupted ``det-ds run``."""
    number = cluster.create(SCRIPT, *SHORT, paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 3)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 2)
    cluster.pause(number, held)
    assert (cluster.experiment(number).state, trial.state) == ("PAUSED", "PAUSED"), cluster.log(trial)[-6000:]
    assert trial.allocations[0].acked
    stopped_at = cluster.checkpoints(trial)[-1].steps
    assert 3 <= stopped_at < 10  # the ranks learn of it a step later

    cluster.activate(number)
    expected = run_here(SCRIPT).metrics
    cluster.wait(number)
    assert (trial.state, trial.restarts) == ("COMPLETED", 0), cluster.log(trial)[-6000:]
    assert [steps for steps, _ in expected["validation"]] == [5, 10]
    assert cluster.metrics(trial, "validation") == expected["validation"]
    assert [checkpoint.steps for checkpoint in cluster.checkpoints(trial)] == sorted({stopped_at, 5, 10})
