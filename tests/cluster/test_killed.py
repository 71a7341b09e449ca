"""Killed again and again, a trial is restarted from its latest checkpoint and still ends right."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.cluster.agent import marked
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere
from tests.cluster.state import Allocation, Trial

CONST = "experiments/gpt2/const.yaml"


@pytest.mark.long("three kills, four starts; test_resume has the same kills without a cluster")
def test_killed_three_times_it_ends_right(cluster: Cluster, run_here: Callable[[str], RunHere]) -> None:
    """Once between checkpoints, once when only one rank is hit, once before there are any."""
    number = cluster.create(CONST, *SHORT, "max_restarts=3", paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 3)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 6)
    cluster.kill_9(trial.allocations[0])
    held.set()

    second = nth_allocation(cluster, trial, 2)
    cluster.poll(lambda: len(ranks_of(second)) == 2)
    os.kill(ranks_of(second)["1"], signal.SIGKILL)

    cluster.kill_9(nth_allocation(cluster, trial, 3))

    cluster.wait(number)
    assert (trial.restarts, trial.run_id, trial.state) == (3, 4, "COMPLETED")
    assert all(allocation.exit_code != 0 for allocation in trial.allocations[:3])
    expected = run_here(CONST).metrics
    for group in ("training", "validation"):
        assert cluster.metrics(trial, group) == expected[group]
    checkpoints = cluster.checkpoints(trial)
    assert [checkpoint.steps for checkpoint in checkpoints] == [5, 10]
    assert [checkpoint.run_id for checkpoint in checkpoints] == [1, 4]


def nth_allocation(cluster: Cluster, trial: Trial, number: int) -> Allocation:
    """Once it has a process."""
    cluster.wait_for(lambda: len(trial.allocations) == number)
    allocation = trial.allocations[-1]
    cluster.poll(lambda: bool(marked("DET_ALLOCATION_ID", allocation.id)))
    return allocation


def ranks_of(allocation: Allocation) -> dict[str, int]:
    """Rank -> process id."""
    found: dict[str, int] = {}
    for process in marked("DET_ALLOCATION_ID", allocation.id):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[1:3] == ["-m", "determined_ds.train"]:
                found[process.environ()["RANK"]] = process.pid
    return found


def test_a_trial_that_fails_is_restarted_so_often_as_allowed_and_no_more(cluster: Cluster) -> None:
    """The log keeps what each run said; nothing is left running."""
    entrypoint = "entrypoint=echo I fail; exit 3"
    number = cluster.create(CONST, "max_restarts=1", "resources.slots_per_trial=1", entrypoint)
    cluster.wait(number, "ERROR")
    trial = cluster.trial(number)
    assert (trial.restarts, trial.run_id, trial.state) == (2, 2, "ERROR")
    assert [allocation.exit_code for allocation in trial.allocations] == [3, 3]
    assert cluster.log(trial).count("\nI fail\n") == 2
    cluster.poll(lambda: not marked("DET_CLUSTER_ID", cluster.master.cluster_id))
