"""Paused, killed and activated, a trial ends as one that never was; and a failure is restarted as often as allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, FakeCluster, best_of, metrics_of
from tests.cluster.scenarios import (
    CONST,
    HF_TRAINER,
    LENGTH,
    LONG_ENOUGH,
    ONE_SLOT,
    ONE_THREAD,
    PIPELINE,
    REAL,
    by_launcher,
    entrypoint,
)
from tests.harness.command import ROOT
from tests.harness.forked import marked

CIFAR10 = "tests/session/scripts/cifar10.yaml"
# Determined ends this launcher five seconds after its ranks; on a busy machine that is a failure, and a restart.
BY_DEEPSPEED = (by_launcher(CONST, "deepspeed"), "max_restarts=5")
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "pipeline": (PIPELINE, ()),
    "launched by deepspeed": (CONST, BY_DEEPSPEED),
    "transformers' Trainer": (HF_TRAINER, ()),
}


@pytest.mark.programs
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
    found = cluster.metrics(trial)
    assert found["validation"] == here["validation"]
    assert found["training"] == here["training"] or path == HF_TRAINER  # which reports as it logs
    if path == HF_TRAINER:
        assert best_of(trial)["eval_loss"] == min(metrics["eval_loss"] for _, metrics in here["validation"])
    else:
        assert f"resumed at batch {stopped} of {LENGTH}" in cluster.log(trial)


@pytest.mark.programs
@pytest.mark.long("test_follow pauses a trial, and tests/interrupted stops sessions")
def test_a_session_ends_as_if_it_never_was_paused(cluster: Cluster, run_here: Callable[..., Path]) -> None:
    """A script that is sent as it is."""
    num_epochs = 40 if REAL else 2  # of five steps each
    script = ROOT / "tests/session/scripts/cifar10_ported.py"
    periods = ("hyperparameters.fit.reporting_period.batches=1", "reproducibility.experiment_seed=7")
    words = (CIFAR10, ONE_THREAD, *periods, entrypoint(CIFAR10, more=f" --epochs {num_epochs}"))
    number = cluster.create(*words, include=script, paused=True)
    assert 2 <= cluster.stop(number, at=2) < 5 * num_epochs
    cluster.activate(number)
    [trial] = cluster.wait(number)
    assert (trial.restarts, len(cluster.starts(trial))) == (0, 2)
    assert cluster.experiment(number).progress == 1.0
    here = metrics_of(run_here(*words, context=script.parent))
    assert cluster.metrics(trial) == here
    assert best_of(trial)["accuracy"] == max(metrics["accuracy"] for _, metrics in here["validation"])


def test_a_trial_that_fails_is_restarted_as_often_as_allowed(cluster: Cluster) -> None:
    """The log keeps what each run said; nothing is left running."""
    number = cluster.create(CONST, "max_restarts=1", ONE_SLOT, "entrypoint=echo I fail; exit 3")
    [trial] = cluster.wait(number, "ERROR")
    assert len(cluster.starts(trial)) == 2
    assert len(re.findall(r"I fail$", cluster.log(trial), re.MULTILINE)) == 2
    if isinstance(cluster, FakeCluster):
        left = cluster.kept(trial).allocations
        cluster.poll(lambda: not any(marked(allocation.id, "DET_ALLOCATION_ID") for allocation in left))
