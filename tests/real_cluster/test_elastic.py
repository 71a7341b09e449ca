"""A trial is continued, and a new one begun, on other slots and under another ZeRO stage than wrote the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from determined_ds import load_state_dict_from_checkpoint_path
from tests.command import det_ds_program
from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import TINY, RunHere

CONST = "experiments/gpt2/const.yaml"  # without dropout, of which each replica draws its own
PIPELINE = "experiments/gpt2/pipeline.yaml"
LONGER = (
    *TINY,
    "hyperparameters.fit.max_length.batches=40",
    "hyperparameters.fit.validation_period.batches=20",
    "hyperparameters.fit.checkpoint_period.batches=20",
    "hyperparameters.fit.reporting_period.batches=1",
)
# (batch of which it is stopped, at the earliest; what it is continued with)
THEN = (
    (
        8,
        ("resources.slots_per_trial=1", "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=3"),
    ),
    (
        20,
        ("resources.slots_per_trial=2", "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=2"),
    ),
)


def test_continued_on_1_slot_and_on_2_again_it_trains_the_same(
    cpu_cluster: RealCluster, run_here: RunHere
) -> None:
    """2 slots and ZeRO 1, then 1 and ZeRO 3, then 2 and ZeRO 2: each batch once, the losses those of one training."""
    cluster = cpu_cluster
    number = cluster.create(CONST, *LONGER)
    for steps, overrides in THEN:
        cluster.wait_for_report(cluster.trial(number), steps)
        cluster.det("experiment", "cancel", str(number))
        cluster.wait(number, "STATE_CANCELED")
        cluster.continue_(number, *overrides)
    [trial] = cluster.wait(number)
    assert (trial["restarts"], len(cluster.allocations(trial))) == (0, 3)
    here, found = run_here(CONST, *LONGER), cluster.metrics(trial)
    assert [steps for steps, _ in found["training"]] == list(range(1, 41))
    for group, name in (("training", "loss"), ("validation", "validation_loss")):
        expected = {steps: metrics[name] for steps, metrics in here[group]}
        # One sum of 32 samples, or two of 16: the last digits drift apart, from batch to batch.
        assert {steps: metrics[name] for steps, metrics in found[group]} == pytest.approx(expected, rel=2e-5)
    log = cluster.log(trial)
    assert "1 replica, ZeRO 3" in log
    assert "2 replicas, ZeRO 2" in log
    assert re.search(r"elastic +2 ranks .* -> 1 rank ", log)
    assert re.search(r"elastic +1 rank .* -> 2 ranks ", log)


# (batch of which it is stopped, at the earliest; the schedule that it is continued under)
SCHEDULES = (
    (8, ("hyperparameters.pipe_schedule=interleaved",)),
    (20, ("hyperparameters.pipe_schedule=zb-h1", "hyperparameters.partition_method=measured")),
    (30, ("hyperparameters.pipe_schedule=dualpipev", "hyperparameters.partition_method=uniform")),
)


def test_continued_under_other_schedules_it_trains_the_same(
    cpu_cluster: RealCluster, run_here: RunHere
) -> None:
    """A pipeline by 1F1B, then interleaved, by ZB-H1 cut anew, and by DualPipeV: the losses are those of 1F1B."""
    cluster = cpu_cluster
    number = cluster.create(PIPELINE, *LONGER)
    for steps, overrides in SCHEDULES:
        cluster.wait_for_report(cluster.trial(number), steps)
        cluster.det("experiment", "cancel", str(number))
        cluster.wait(number, "STATE_CANCELED")
        cluster.continue_(number, *overrides)
    [trial] = cluster.wait(number)
    assert (trial["restarts"], len(cluster.allocations(trial))) == (0, 4)
    here, found = run_here(PIPELINE, *LONGER), cluster.metrics(trial)
    assert [steps for steps, _ in found["training"]] == list(range(1, 41))
    for group, name in (("training", "loss"), ("validation", "validation_loss")):
        expected = {steps: metrics[name] for steps, metrics in here[group]}
        assert {steps: metrics[name] for steps, metrics in found[group]} == pytest.approx(expected, rel=2e-5)
    log = cluster.log(trial)
    for schedule in ("1f1b", "interleaved, 2 chunks a rank", "zb-h1", "dualpipev, 2 chunks a rank"):
        assert f"  schedule   {schedule}: a bubble of " in log


def test_a_new_training_begins_with_weights_and_optimizer_on_another_slot(
    cluster: RealCluster, tmp_path: Path
) -> None:
    """The checkpoint of two slots, downloaded too: intact, and read by one process."""
    [source] = cluster.wait(cluster.create(CONST, *TINY))
    last = cluster.checkpoints(source)[-1]["uuid"]
    from_it = (
        f"searcher.source_checkpoint_uuid={last}",
        "hyperparameters.fit.warm_start=all",
        "resources.slots_per_trial=1",
    )
    [fork] = cluster.wait(cluster.create(CONST, *TINY, *from_it))
    [said] = [line for line in cluster.log(fork).splitlines() if "warm start" in line]
    assert "its weights, optimizer, schedule and loss scale; counting from batch 0" in said
    before, after = (cluster.metrics(trial)["training"] for trial in (source, fork))
    assert after[0][1]["lr"] >= before[-1][1]["lr"], "its schedule goes on"
    assert after[0][1]["loss"] < before[0][1]["loss"] - 1.0

    got = tmp_path / "got"
    cluster.det("checkpoint", "download", last, "-o", got)
    for command in ("show", "verify"):
        done = det_ds_program("checkpoint", command, got)
        assert done.returncode == 0, done.stderr
    assert load_state_dict_from_checkpoint_path(got)
