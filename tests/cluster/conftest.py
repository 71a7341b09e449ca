"""The cluster of the scenarios: ours, or the real one that ``DET_MASTER`` names; and the same trainings without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.agent import way_to_isolate
from tests.cluster.cluster import Cluster, FakeCluster
from tests.cluster.scenarios import REAL
from tests.harness.command import ROOT, det_ds
from tests.harness.required import skip_or_fail


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of two CPU slots; or a real one, on which all that the tests have created is deleted at the end."""
    if REAL:
        real = Cluster(REAL)
        yield real
        real.delete_all()
        return
    try:
        way_to_isolate()
    except OSError as error:
        skip_or_fail("cluster", str(error))
    made = FakeCluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def fake(cluster: Cluster) -> FakeCluster:
    """Ours alone, for what no real master lets a test do or see."""
    if not isinstance(cluster, FakeCluster):
        pytest.skip("only our cluster injects faults and shows what its master was asked")
    return cluster


@pytest.fixture(scope="session")
def run_here(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``run_here(config, *overrides, context=ROOT)``: the run directory of ``det-ds run``, once a session.

    A real cluster has to have CPU slots, as there are here: only on the same kind of device are numbers the same.
    """
    if len(cluster.slots("TYPE_CPU")) != len(cluster.slots()):
        pytest.skip("the cluster's slots are not CPUs, and det-ds run here is on CPUs")
    known: dict[tuple[str, ...], Path] = {}

    def run(config: str | Path, *overrides: str, context: Path = ROOT) -> Path:
        key = (str(config), *overrides)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("here") / "run"
            words = [word for override in overrides for word in ("--set", override)]
            done = det_ds("run", config, context, *words, "--run-dir", known[key])
            assert done.returncode == 0, done.stderr
        return known[key]

    return run
