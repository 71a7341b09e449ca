"""The master that ``DET_MASTER`` names; without it every test here skips. See CONTRIBUTING."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import alike
from tests.command import det_ds_program
from tests.real_cluster.client import TIMEOUT_S, Metrics, RealCluster

# As here: with other threads come other last digits, and trials on one agent of CPU slots share its cores.
ONE_THREAD = "environment.environment_variables=['OMP_NUM_THREADS=1']"
# A template cut short: what is started takes longer than what it trains.
SHORT = (
    ONE_THREAD,
    "hyperparameters.fit.max_length.batches=10",
    "hyperparameters.fit.validation_period.batches=5",
    "hyperparameters.fit.checkpoint_period.batches=5",
    "hyperparameters.fit.reporting_period.batches=2",
)


# The same of GPT-2, made small.
TINY = (*SHORT, "hyperparameters.sequence_length=32", "data.max_validation_sequences=64")

# config, overrides -> metrics of the run, as ``RealCluster.metrics`` says of a trial.
RunHere = Callable[..., dict[str, Metrics]]


@pytest.fixture(scope="session")
def cluster() -> Iterator[RealCluster]:
    """A real cluster; what the tests created there is deleted at the end, whatever became of them."""
    if not (address := os.environ.get("DET_MASTER")):
        pytest.skip("no DET_MASTER: the address of a real Determined master")
    real = RealCluster(address)
    try:
        yield real
    finally:
        real.delete_all()


@pytest.fixture(scope="session")
def cpu_cluster(cluster: RealCluster) -> RealCluster:
    """One whose slots are CPUs, as ``run_here`` has: only on the same kind of device are numbers the same."""
    if kinds := {slot["type"] for slot in cluster.slots()} - {"TYPE_CPU"}:
        pytest.skip(f"its slots are {', '.join(sorted(kinds))}, and det-ds run here is on CPUs")
    return cluster


@pytest.fixture(scope="session")
def run_here(tmp_path_factory: pytest.TempPathFactory) -> RunHere:
    """``run_here(config, *overrides)``: the experiment by ``det-ds run``, and no setting beside; once a session."""
    known: dict[tuple[str, ...], dict[str, Metrics]] = {}

    def run(config: str, *overrides: str) -> dict[str, Metrics]:
        key = (config, *overrides)
        if key not in known:
            run_dir = tmp_path_factory.mktemp("here") / "run"
            words = [word for override in overrides for word in ("--set", override)]
            done = det_ds_program("run", config, ".", *words, "--run-dir", run_dir, timeout_s=TIMEOUT_S)
            assert done.returncode == 0, done.stderr
            known[key] = _metrics_of(run_dir)
        return known[key]

    return run


def _metrics_of(run_dir: Path) -> dict[str, Metrics]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        group: [(line["steps_completed"], alike(line["metrics"])) for line in lines if line["group"] == group]
        for group in ("training", "validation")
    }
