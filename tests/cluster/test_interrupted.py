"""Paused, killed and activated, a trial ends as one that never was; and a failure is restarted as often as allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.agent import marked
from tests.cluster.client import Cluster, metrics_of
from tests.cluster.fake import FakeCluster
from tests.cluster.scenarios import (
    CONST,
    INTERLEAVED,
    KILLED,
    LENGTH,
    LONG_ENOUGH,
    ONE_SLOT,
    PIPELINE,
    SEQUENCE_PARALLEL,
    SHORT,
    ZB_H1,
    by_launcher,
    killed,
)

LONG = pytest.mark.long("the same under another strategy or launcher; test_follow pauses and activates")
# One at each second batch, written while training continues; that of a pause is complete before the exit.
WRITTEN_ASIDE = (
    "hyperparameters.fit.checkpoint_period.batches=2",
    "hyperparameters.fit.asynchronous_checkpoints=true",
)
# Determined ends this launcher five seconds after its ranks; on a busy machine that is a failure, and a restart.
BY_DEEPSPEED = (by_launcher(CONST, "deepspeed"), "max_restarts=5")
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pipeline": (PIPELINE, ()),
    "zb-h1": (ZB_H1, ()),
    "sequence parallel": (SEQUENCE_PARALLEL, ()),
    "asynchronous checkpoints": (CONST, WRITTEN_ASIDE),
    "launched by deepspeed": (CONST, BY_DEEPSPEED),
}


@pytest.mark.long("the same under another strategy or launcher; test_follow pauses and activates")
@pytest.mark.parametrize("form", FORMS)
def test_paused_and_activated_it_ends_as_if_it_never_was(
    cluster: Cluster, run_here: Callable[..., Path], form: str
) -> None:
    path, overrides = FORMS[form]
    number = cluster.create(path, *LONG_ENOUGH, *overrides, paused=True)
    stopped = cluster.stop(number, at=2)
    assert 2 <= stopped < LENGTH
    cluster.activate(number)
    here = metrics_of(run_here(path, *LONG_ENOUGH))
    [trial] = cluster.wait(number)
    assert trial.restarts == 0 or overrides == BY_DEEPSPEED
    assert f"resumed at batch {stopped} of {LENGTH}" in cluster.log(trial)
    assert cluster.metrics(trial) == here


ON_A_CLUSTER = pytest.mark.long("tests/interrupted kills ranks, and below a trial that fails is restarted")
OF_CHIEF = pytest.mark.long("the chief is killed; the first case kills the other")
OF_PIPELINE = pytest.mark.long("a pipeline; the first case has replicas")


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        pytest.param(CONST, 1, marks=ON_A_CLUSTER),
        pytest.param(CONST, 0, marks=OF_CHIEF),
        pytest.param(INTERLEAVED, 1, marks=OF_PIPELINE),
    ],
)
def test_a_killed_rank_costs_one_restart_and_no_number(
    cluster: Cluster, run_here: Callable[..., Path], path: str, rank: int
) -> None:
    """Killed at batch 8 of 10, it goes on from the checkpoint at 5."""
    number = cluster.create(path, *SHORT, *killed(path, rank), include=KILLED)
    here = metrics_of(run_here(path, *SHORT))
    [trial] = cluster.wait(number)
    assert trial.restarts == 1
    assert "resumed at batch 5 of 10" in cluster.log(trial)
    assert cluster.metrics(trial) == here


def test_a_trial_that_fails_is_restarted_as_often_as_allowed(cluster: Cluster) -> None:
    """The log keeps what each run said; nothing is left running."""
    number = cluster.create(CONST, "max_restarts=1", ONE_SLOT, "entrypoint=echo I fail; exit 3")
    [trial] = cluster.wait(number, "ERROR")
    assert cluster.num_starts(trial) == 2
    assert len(re.findall(r"I fail$", cluster.log(trial), re.MULTILINE)) == 2
    if isinstance(cluster, FakeCluster):
        left = cluster.kept(trial).allocations
        cluster.poll(lambda: not any(marked("DET_ALLOCATION_ID", allocation.id) for allocation in left))
