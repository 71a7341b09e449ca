"""A cluster of two CPU slots, and the same trainings without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.agent import way_to_isolate
from tests.cluster.cluster import Cluster
from tests.harness.command import ROOT, det_ds
from tests.harness.required import skip_or_fail


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        way_to_isolate()
    except OSError as error:
        skip_or_fail("cluster", str(error))
    with Cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made
    assert not made.master.server.errors, made.master.server.errors


@pytest.fixture(scope="session")
def run_here(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``run_here(config, *overrides, context=ROOT)``: the run directory of ``det-ds run``, once a session."""
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
