"""Paused, killed, forked, continued: a trial goes on as if nothing had been, or begins where it is meant to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.command import ROOT
from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import TINY, RunHere

CONST = "experiments/gpt2/const.yaml"
INTERLEAVED, ZB_H1, SEQUENCE_PARALLEL = (
    f"experiments/gpt2/{name}.yaml" for name in ("interleaved", "zb_h1", "sequence_parallel")
)
# Long enough to be paused in the middle.
LONGER = (
    *TINY,
    "hyperparameters.fit.max_length.batches=100",
    "hyperparameters.fit.validation_period.batches=50",
    "hyperparameters.fit.checkpoint_period.batches=50",
    "hyperparameters.fit.reporting_period.batches=2",
)

# Two checkpoints may be written at a time, so the batches that follow pass beside one.
WRITTEN_ASIDE = (
    *LONGER,
    "hyperparameters.fit.checkpoint_period.batches=2",
    "hyperparameters.fit.asynchronous_checkpoints=true",
)


def killed(path: str) -> str:
    """The entrypoint of a template with the trial of ``killed.py``."""
    entrypoint = str(yaml.safe_load((ROOT / path).read_text())["entrypoint"])
    for name, trial in (("GPT2Trial", "Killed"), ("GPT2PipelineTrial", "KilledPipeline")):
        entrypoint = entrypoint.replace(f"model_defs.gpt2.trial:{name}", f"killed:{trial}")
    return f"entrypoint={entrypoint}"


@pytest.mark.parametrize("path", [CONST, ZB_H1, SEQUENCE_PARALLEL])
def test_paused_and_activated_it_ends_as_if_it_never_was(
    cpu_cluster: RealCluster, run_here: RunHere, path: str
) -> None:
    cluster = cpu_cluster
    number = cluster.create(path, *LONGER)
    cluster.wait_for_report(cluster.trial(number), 4)
    cluster.pause(number)
    [stopped] = cluster.checkpoints(cluster.trial(number))
    assert 4 <= stopped["metadata"]["steps_completed"] < 100
    cluster.det("experiment", "activate", str(number))
    here = run_here(path, *LONGER)
    [trial] = cluster.wait(number)
    assert trial["restarts"] == 0
    assert cluster.metrics(trial) == here


def test_checkpoints_that_are_being_written_cost_no_number_at_a_pause(
    cpu_cluster: RealCluster, run_here: RunHere
) -> None:
    """One at each second batch, written while training continues; that of the pause is complete before the exit."""
    cluster = cpu_cluster
    number = cluster.create(CONST, *WRITTEN_ASIDE)
    cluster.wait_for_report(cluster.trial(number), 4)
    cluster.pause(number)
    stopped = cluster.checkpoints(cluster.trial(number))[-1]["metadata"]["steps_completed"]
    assert 4 <= stopped < 100
    cluster.det("experiment", "activate", str(number))
    [trial] = cluster.wait(number)
    assert f"resumed at batch {stopped} of 100" in cluster.log(trial)
    assert (trial["restarts"], cluster.metrics(trial)) == (0, run_here(CONST, *LONGER))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_killed_while_a_checkpoint_is_written_it_goes_on_from_a_whole_one(
    cpu_cluster: RealCluster, run_here: RunHere, rank: str
) -> None:
    """Killed in the batch after those of a checkpoint: it is there whole, or the one before it counts."""
    cluster = cpu_cluster
    number = cluster.create(
        CONST,
        *WRITTEN_ASIDE,
        killed(CONST),
        "hyperparameters.fit.max_length.batches=50",
        f"environment.environment_variables=['OMP_NUM_THREADS=1', 'KILLED_RANK={rank}', 'KILLED_AFTER=20']",
        include=Path(__file__).with_name("killed.py"),
    )
    here = run_here(CONST, *LONGER)
    [trial] = cluster.wait(number)
    [resumed] = re.findall(r"resumed at batch (\d+) of 50", cluster.log(trial))
    assert resumed in ("16", "18", "20")
    assert trial["restarts"] == 1
    assert cluster.metrics(trial)["training"] == here["training"][:25]


@pytest.mark.parametrize(("path", "rank"), [(CONST, "0"), (CONST, "1"), (INTERLEAVED, "1")])
def test_a_killed_rank_costs_one_restart_and_no_number(
    cpu_cluster: RealCluster, run_here: RunHere, path: str, rank: str
) -> None:
    """Killed at batch 8 of 10, it goes on from the checkpoint at 5."""
    cluster = cpu_cluster
    number = cluster.create(
        path,
        *TINY,
        killed(path),
        f"environment.environment_variables=['OMP_NUM_THREADS=1', 'KILLED_RANK={rank}']",
        include=Path(__file__).with_name("killed.py"),
    )
    here = run_here(path, *TINY)
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
    cluster.continue_(number, "hyperparameters.fit.max_length.batches=20")
    [trial] = cluster.wait(number)
    assert [steps for steps, _ in cluster.metrics(trial)["validation"]] == [5, 10, 15, 20]
    assert [steps for steps, _ in cluster.metrics(trial)["training"]] == list(range(2, 21, 2))
    assert "resumed at batch 10 of 20" in cluster.log(trial)
