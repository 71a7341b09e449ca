"""A training that goes on as another one, and what a checkpoint is worth.

On our cluster its checkpoints are in S3, by the real harness and boto3: a server that answers this machine only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, FakeCluster, Trial, metrics_of
from tests.cluster.scenarios import CONST, EVERY_BATCH, LENGTH, ONE_SLOT, REAL, SHORT, entrypoint

pytestmark = pytest.mark.long(
    "forks and continues on a cluster, from S3; test_follow downloads, cli/test_going_on.py forks"
)


@pytest.fixture(scope="module")
def storage(request: pytest.FixtureRequest) -> list[str]:
    """Overrides that put checkpoints into S3, where that can be reached."""
    where = {} if REAL else {**request.getfixturevalue("s3"), "prefix": "of/a/team"}
    return [f"checkpoint_storage.{key}={value}" for key, value in where.items()]


@pytest.fixture(scope="module")
def source(cluster: Cluster, storage: list[str]) -> Trial:
    """``const.yaml``, cut short; on ours paused, and activated."""
    number = cluster.create(CONST, *SHORT, *storage, paused=True)
    if isinstance(cluster, FakeCluster):
        cluster.stop(number, at=2)
    cluster.activate(number)
    [trial] = cluster.wait(number)
    assert (trial.restarts, len(cluster.starts(trial))) == (0, 1 if REAL else 2)
    return trial


def last(cluster: Cluster, trial: Trial) -> str:
    """The uuid of its last checkpoint."""
    return cluster.checkpoints(trial)[-1].uuid


def test_paused_and_activated_with_its_checkpoints_in_s3_it_ends_as_if_it_never_was(
    fake: FakeCluster, source: Trial, run_here: Callable[..., Path]
) -> None:
    assert fake.metrics(source) == metrics_of(run_here(CONST, *SHORT))
    assert not list(fake.storage.glob(f"{last(fake, source)}*"))


def test_a_fork_begins_with_the_weights_and_says_so(
    cluster: Cluster, source: Trial, storage: list[str]
) -> None:
    """As the web UI's Continue Trial does, which makes a new experiment: the rate is that of a first step again."""
    checkpoint = last(cluster, source)
    origin = f"searcher.source_trial_id={source.id}"
    [fork] = cluster.wait(cluster.create(CONST, *SHORT, *storage, origin))
    taken = "its weights alone, with a new optimizer and schedule; counting from batch 0"
    assert f"warm start  batch 10 of trial {source.id}, checkpoint {checkpoint}: {taken}" in cluster.log(fork)
    before, after = (cluster.reports(trial, "training") for trial in (source, fork))
    assert [steps for steps, _ in after] == [steps for steps, _ in before]
    assert after[0][1]["loss"] < before[0][1]["loss"]
    assert after[0][1]["lr"] == before[0][1]["lr"]


def test_a_checkpoint_is_evaluated_by_its_uuid_and_nothing_is_trained(
    cluster: Cluster, source: Trial, storage: list[str]
) -> None:
    """On one slot, where two have trained."""
    evaluates = entrypoint(CONST, more=f" --evaluate {last(cluster, source)}")
    [trial] = cluster.wait(cluster.create(CONST, *SHORT, ONE_SLOT, *storage, evaluates))
    [(steps, metrics)] = cluster.metrics(trial)["validation"]
    then = cluster.metrics(source)["validation"][-1]
    assert steps == then[0]
    assert metrics["validation_loss"] == pytest.approx(then[1]["validation_loss"], rel=1e-5)
    assert not cluster.metrics(trial)["training"]
    assert not cluster.checkpoints(trial)


STAGE = "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage"


def test_canceled_and_continued_on_other_slots_it_trains_the_same(
    cluster: Cluster, run_here: Callable[..., Path]
) -> None:
    """Each batch once, and the losses are those of one training; of a model without dropout."""
    number = cluster.create(CONST, *EVERY_BATCH, paused=True)
    then, at_last = (ONE_SLOT, f"{STAGE}=3"), ("resources.slots_per_trial=2", f"{STAGE}=2")
    for at, changed in ((LENGTH // 4, then), (LENGTH // 2, at_last)):
        cluster.stop(number, at=at, how="cancel")
        cluster.continue_(number, *changed)
    [trial] = cluster.wait(number)
    assert (trial.restarts, len(cluster.starts(trial))) == (0, 3)
    here, found = metrics_of(run_here(CONST, *EVERY_BATCH)), cluster.metrics(trial)
    for group, loss in (("training", "loss"), ("validation", "validation_loss")):
        expected = {steps: metrics[loss] for steps, metrics in here[group]}
        assert [steps for steps, _ in found[group]] == list(expected)
        # One sum of 32 samples, or two of 16: the last digits drift apart, to 1.5e-4 within 100 batches.
        drift = 1e-3 if REAL else 1e-4
        assert {steps: metrics[loss] for steps, metrics in found[group]} == pytest.approx(expected, rel=drift)
    for ranks in ("+2 ranks -> 1 rank;", "+1 rank -> 2 ranks;"):
        assert re.search(f"elastic {ranks}", cluster.log(trial)), ranks
