"""Every template that needs no CUDA, created by the real ``det``: it ends well, with the numbers of ``det-ds run``."""

from __future__ import annotations

import pytest
import yaml

from tests.command import ROOT
from tests.experiments.test_templates import RUN_ANYWHERE
from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import SHORT, RunHere

CONST = "experiments/gpt2/const.yaml"
CASES = [(CONST, ()), *((path, SHORT) for path in RUN_ANYWHERE if not path.endswith("/search.yaml"))]


@pytest.mark.parametrize(("path", "overrides"), CASES)
def test_its_metrics_are_those_of_a_run_here(
    cpu_cluster: RealCluster, run_here: RunHere, path: str, overrides: tuple[str, ...]
) -> None:
    """To the last digit, and from the same seed. The first case is a whole template, and nothing is set there."""
    cluster = cpu_cluster
    slots = yaml.safe_load((ROOT / path).read_text())["resources"]["slots_per_trial"]
    if slots > (there := len(cluster.slots())):
        pytest.skip(f"it takes {slots} slots, and the cluster has {there}")
    number = cluster.create(path, *overrides)
    here = run_here(path, *overrides)
    [trial] = cluster.wait(number)
    assert trial["restarts"] == 0
    assert here["training"]
    assert here["validation"]
    assert cluster.metrics(trial) == here
