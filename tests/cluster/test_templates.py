"""Templates created by the real ``det``, of each model one that needs no CUDA: with the numbers of ``det-ds run``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster, metrics_of
from tests.cluster.scenarios import CONST, LONG_ENOUGH, ONE_SLOT, REAL, batches, entrypoint
from tests.harness.command import ROOT

# Those that need no CUDA, by the second line of their comments; on a real cluster all of them but the searches.
ON_CPU = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "experiments").glob("*/*.yaml"))
    if "CPU" in path.read_text().splitlines()[1]
]
PATHS = [path for path in ON_CPU if "/const" in path or (REAL and "/search" not in path)]
pytestmark = pytest.mark.long(
    "whole trainings; test_follow trains const.yaml, experiments/test_templates.py the rest"
)


@pytest.mark.parametrize("path", PATHS)
def test_its_metrics_are_those_of_a_run_here(
    cluster: Cluster, run_here: Callable[..., Path], path: str
) -> None:
    """To the last digit, and from the same seed."""
    if yaml.safe_load((ROOT / path).read_text())["resources"]["slots_per_trial"] > len(cluster.slots()):
        pytest.skip("it takes more slots than the cluster has")
    number = cluster.create(path, *batches(10))
    here = metrics_of(run_here(path, *batches(10)))
    [trial] = cluster.wait(number)
    assert trial.restarts == 0
    assert all(here.values())
    assert cluster.metrics(trial) == here


@pytest.mark.parametrize("launcher", ["deepspeed", "torch_distributed"])
def test_trials_run_side_by_side_on_one_agent(cluster: Cluster, launcher: str) -> None:
    """One slot a trial, and every slot taken: the ranks of two on one host network do not meet at a port."""
    slots = cluster.slots()
    if len(set(slots)) == len(slots):
        pytest.skip("no agent has two slots")
    overrides = (*LONG_ENOUGH, ONE_SLOT, entrypoint(CONST, launcher), "max_restarts=5")
    numbers = [cluster.create(CONST, *overrides, paused=True) for _ in slots]
    with cluster.reached(2, *numbers):
        assert {cluster.trial(number).state.name for number in numbers} == {"RUNNING"}
    trials = [trial for number in numbers for trial in cluster.wait(number)]
    first, *others = [cluster.metrics(trial) for trial in trials]
    assert others == [first] * len(others), "the same experiment, other numbers"
    assert not [trial for trial in trials if "EADDRINUSE" in cluster.log(trial)]
