"""Paused, killed, forked, continued: a trial goes on as if nothing had been, or begins where it is meant to."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.command import ROOT
from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import TINY, RunHere

CONST = "experiments/gpt2/const.yaml"
ENTRYPOINT = str(yaml.safe_load((ROOT / CONST).read_text())["entrypoint"])
# Long enough to be paused in the middle.
LONGER = (
    *TINY,
    "hyperparameters.fit.max_length.batches=100",
    "hyperparameters.fit.validation_period.batches=50",
    "hyperparameters.fit.checkpoint_period.batches=50",
    "hyperparameters.fit.reporting_period.batches=2",
)


def test_paused_and_activated_it_ends_as_if_it_never_was(cpu_cluster: RealCluster, run_here: RunHere) -> None:
    cluster = cpu_cluster
    number = cluster.create(CONST, *LONGER)
    cluster.wait_for_report(cluster.trial(number), 4)
    cluster.det("experiment", "pause", str(number))
    cluster.poll(lambda: cluster.trial(number)["state"] == "STATE_PAUSED" and _has_ended(cluster, number))
    [stopped] = cluster.checkpoints(cluster.trial(number))
    assert 4 <= stopped["metadata"]["steps_completed"] < 100
    cluster.det("experiment", "activate", str(number))
    here = run_here(CONST, *LONGER)
    [trial] = cluster.wait(number)
    assert trial["restarts"] == 0
    assert cluster.metrics(trial) == here


def _has_ended(cluster: RealCluster, number: int) -> bool:
    return all(allocation.ended for allocation in cluster.allocations(cluster.trial(number)))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_killed_rank_costs_one_restart_and_no_number(
    cpu_cluster: RealCluster, run_here: RunHere, rank: str
) -> None:
    """Killed at batch 8 of 10, it goes on from the checkpoint at 5."""
    cluster = cpu_cluster
    number = cluster.create(
        CONST,
        *TINY,
        "entrypoint=" + ENTRYPOINT.replace("model_defs.gpt2.trial:GPT2Trial", "killed:Killed"),
        f"environment.environment_variables=['OMP_NUM_THREADS=1', 'KILLED_RANK={rank}']",
        include=Path(__file__).with_name("killed.py"),
    )
    here = run_here(CONST, *TINY)
    [trial] = cluster.wait(number)
    assert trial["restarts"] == 1
    assert "resumed at batch 5 of 10" in cluster.log(trial)
    assert cluster.metrics(trial) == here


def test_a_fork_starts_from_the_weights_and_counts_from_0(cluster: RealCluster) -> None:
    [source] = cluster.wait(cluster.create(CONST, *LONGER))
    [fork] = cluster.wait(cluster.create(CONST, *TINY, f"searcher.source_trial_id={source['id']}"))
    first, again = cluster.metrics(source)["training"], cluster.metrics(fork)["training"]
    assert [steps for steps, _ in again] == [2, 4, 6, 8, 10]
    assert again[0][1]["loss"] < first[0][1]["loss"] - 1.0
    assert again[0][1]["lr"] == first[0][1]["lr"], "a schedule of its own"
    [last] = [c for c in cluster.checkpoints(source) if c["metadata"]["steps_completed"] == 100]
    [said] = [line for line in cluster.log(fork).splitlines() if "warm start" in line]
    assert last["uuid"] in said


def test_continued_it_counts_on(cluster: RealCluster) -> None:
    """``det experiment continue``, for a longer training than was asked for at first."""
    number = cluster.create(CONST, *TINY)
    [trial] = cluster.wait(number)
    cluster.det(
        "experiment", "continue", str(number), "--config", "hyperparameters.fit.max_length.batches=20"
    )
    cluster.poll(lambda: cluster.experiment(number)["state"] != "STATE_COMPLETED")
    [trial] = cluster.wait(number)
    assert [steps for steps, _ in cluster.metrics(trial)["validation"]] == [5, 10, 15, 20]
    assert [steps for steps, _ in cluster.metrics(trial)["training"]] == list(range(2, 21, 2))
    assert "resumed at batch 10 of 20" in cluster.log(trial)
