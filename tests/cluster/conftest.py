"""One cluster for the tests of a module; they skip, and say why, where a container cannot be had."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.agent import why_not
from tests.cluster.cluster import Cluster, alike
from tests.command import det_ds

# (steps, metrics) of a group of a run: what ``Cluster.metrics`` says of a trial.
Metrics = dict[str, list[tuple[int, dict[str, Any]]]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two CPU slots."""
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
    assert not made.master.server.errors, made.master.server.errors


@pytest.fixture(scope="session")
def run_here(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Metrics]:
    """``run_here(config, overrides, seed)``: what ``det-ds run`` reports of an experiment, without a cluster."""
    known: dict[tuple[Any, ...], Metrics] = {}

    def run(config: str, overrides: tuple[str, ...], seed: int) -> Metrics:
        key = (config, overrides, seed)
        if key not in known:
            run_dir = tmp_path_factory.mktemp("here") / "run"
            known[key] = _run_here(config, [*overrides, f"reproducibility.experiment_seed={seed}"], run_dir)
        return known[key]

    return run


def _run_here(config: str, overrides: list[str], run_dir: Path) -> Metrics:
    words = [word for override in overrides for word in ("--set", override)]
    done = det_ds("run", config, ".", *words, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        group: [(line["steps_completed"], alike(line["metrics"])) for line in lines if line["group"] == group]
        for group in ("training", "validation")
    }
