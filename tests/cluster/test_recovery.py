"""A trial of a cluster that recovers by itself: the master starts it again, and tells it what its last start met."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, metrics_of
from tests.cluster.scenarios import CONST, ONE_SLOT, ONE_THREAD, SMALL, fit

FAULTY = Path(__file__).with_name("faulty.py")
RUNS = (
    "entrypoint=python3 -m determined.launch.torch_distributed python3 -m determined_ds.train faulty:Faulty"
)
WORDS = (
    RUNS,
    *SMALL,
    "hyperparameters.global_batch_size=8",
    "max_restarts=2",
    *fit(max_length=24, validation_period=24, checkpoint_period=4, reporting_period=2),
)
ON_SPIKE = "hyperparameters.fit.on_spike={window: 10, deviations: 200, skip: 3}"


def with_fault(fault: str) -> str:
    return ONE_THREAD.replace("]", f", 'FAULT={fault}']")


@pytest.mark.programs
@pytest.mark.parametrize(
    "kind", [pytest.param("oom", marks=pytest.mark.long("the same way to a master and back")), "spike"]
)
def test_it_ends_as_a_run_without_the_fault(
    kind: str, cluster: Cluster, run_here: Callable[..., Path]
) -> None:
    words = (*WORDS, ON_SPIKE, *([ONE_SLOT] if kind == "spike" else []))
    number = cluster.create(CONST, *words, with_fault(f"{kind}:16"), include=FAULTY)
    told = ["hyperparameters.fit.skip_batches=[15, 17]"] if kind == "spike" else []
    here = metrics_of(
        run_here(CONST, *words, *told, RUNS.replace("faulty:", "tests.cluster.faulty:"), ONE_THREAD)
    )
    [trial] = cluster.wait(number)
    log, metrics = cluster.log(trial), cluster.metrics(trial)
    assert (trial.state.name, trial.restarts) == ("COMPLETED", 1), log
    said = [found for _, found in cluster.reports(trial, "recovery")]
    assert [found["recoveries"] for found in said if "recoveries" in found] in ([1], [])
    [fault] = json.loads(said[-1]["recovery_record_1"])
    assert 0 < said[-1].get("goodput", 0) < 1, log
    if kind == "oom":
        assert "micro-batches of 4 do not fit: the next start takes at most 2" in log
        assert (fault["cause"], fault["micro_batch_size"]) == ("out of memory", 4)
        losses, others = ([found["loss"] for _, found in each["training"]] for each in (metrics, here))
        assert losses == pytest.approx(others, rel=1e-4)
    else:
        assert "the next start goes back to checkpoint" in log
        assert "leaves out batches 15 to 17 of the data" in log
        assert metrics == here
