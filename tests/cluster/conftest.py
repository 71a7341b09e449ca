"""One cluster for all tests here; they skip, and say why, where a container cannot be had."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.agent import why_not
from tests.cluster.cluster import Cluster, alike
from tests.command import det_ds

# A template cut short: what is started takes longer than what it trains.
SHORT = (
    "hyperparameters.sequence_length=32",
    "hyperparameters.fit.max_length.batches=10",
    "hyperparameters.fit.validation_period.batches=5",
    "hyperparameters.fit.checkpoint_period.batches=5",
    "hyperparameters.fit.reporting_period.batches=2",
    "data.max_validation_sequences=64",
)


@dataclass(frozen=True, kw_only=True)
class RunHere:
    """A run without a cluster.

    Args:
        run_dir: Its run directory.
        metrics: Group -> (steps, metrics), as ``Cluster.metrics`` says of a trial.
        seed: The trial's.
    """

    run_dir: Path
    metrics: dict[str, list[tuple[int, dict[str, Any]]]]
    seed: int


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two CPU slots."""
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
    assert not made.master.server.errors, made.master.server.errors


@pytest.fixture(scope="session")
def run_here(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunHere]:
    """``run_here(config)``: an experiment, cut short, by ``det-ds run``; once a session."""
    known: dict[str, RunHere] = {}

    def run(config: str) -> RunHere:
        if config not in known:
            run_dir = tmp_path_factory.mktemp("here") / "run"
            words = [word for override in SHORT for word in ("--set", override)]
            done = det_ds("run", config, ".", *words, "--run-dir", run_dir)
            assert done.returncode == 0, done.stderr
            seed = json.loads((run_dir / "result.json").read_text())["trial_seed"]
            known[config] = RunHere(run_dir=run_dir, metrics=_metrics_of(run_dir), seed=seed)
        return known[config]

    return run


def _metrics_of(run_dir: Path) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        group: [(line["steps_completed"], alike(line["metrics"])) for line in lines if line["group"] == group]
        for group in ("training", "validation")
    }
