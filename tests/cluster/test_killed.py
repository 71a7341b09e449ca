"""Killed again and again, a trial is restarted from its latest checkpoint and still ends right."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from tests.cluster.agent import marked
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import Metrics
from tests.cluster.test_pause import SHORT

CONST = "experiments/gpt2/const.yaml"


def test_killed_three_times_it_ends_right(cluster: Cluster, run_here: Callable[..., Metrics]) -> None:
    """Once between checkpoints, once before its ranks have met, once when only one rank is hit."""
    number = cluster.create(CONST, *SHORT, "max_restarts=3")
    trial = cluster.trial(number)
    cluster.wait_for_report(trial, "training", 9)
    cluster.kill_9(trial.allocations[0])

    cluster.wait_for(lambda: len(trial.allocations) == 2 and trial.allocations[1].ready)
    cluster.kill_9(trial.allocations[1])

    cluster.wait_for(lambda: len(trial.allocations) == 3)
    third = trial.allocations[2]
    cluster.wait_for(lambda: bool(cluster.calls("GET", ".*/signals/preemption", allocation=third.id)))
    ranks = [p for p in marked("DET_ALLOCATION_ID", third.id) if "determined_ds.train" in p.cmdline()]
    os.kill(next(p.pid for p in ranks if p.environ().get("RANK") == "1"), signal.SIGKILL)

    cluster.wait(number)
    assert (trial.restarts, trial.run_id, trial.state) == (3, 4, "COMPLETED")
    expected = run_here(CONST, SHORT, trial.seed)
    for group in ("training", "validation"):
        assert cluster.metrics(trial, group) == expected[group]
    checkpoints = cluster.checkpoints(trial)
    assert [checkpoint.steps for checkpoint in checkpoints] == [8, 16]
    assert [checkpoint.run_id for checkpoint in checkpoints] == [1, 4]


def test_a_trial_that_fails_is_restarted_so_often_as_allowed_and_no_more(cluster: Cluster) -> None:
    """The log keeps what each run said; nothing is left running."""
    entrypoint = "entrypoint=echo I fail; exit 3"
    number = cluster.create(CONST, "max_restarts=1", "resources.slots_per_trial=1", entrypoint)
    cluster.wait(number, "ERROR")
    trial = cluster.trial(number)
    assert (trial.restarts, trial.run_id, trial.state) == (2, 2, "ERROR")
    assert [allocation.exit_code for allocation in trial.allocations] == [3, 3]
    assert cluster.log(trial).count("\nI fail\n") == 2
    cluster.wait_for(lambda: not marked("DET_CLUSTER_ID", cluster.master.cluster_id))
