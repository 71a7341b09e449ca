"""A trial over two agents, each on a machine of its own, outlives the cable between them: on our cluster alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import FakeCluster, metrics_of
from tests.cluster.scenarios import CONST, SHORT
from tests.harness.machines import Machine

pytestmark = pytest.mark.long("two machines with an agent each; test_as_rank has two machines under torchrun")

RANKS = {f"det_state_dict_rank{rank}.pth" for rank in (0, 1)}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DETERMINED_DS_HANG_TIMEOUT": "0.1"}


@pytest.mark.usefixtures("fake")  # where there is one, there can be another
def test_a_cut_cable_is_reported_and_the_restart_resumes_from_the_shared_folder(
    machines: tuple[Machine, Machine], run_here: Callable[..., Path]
) -> None:
    """The rank that the master still hears of names the one that it no longer hears of, and exits as a crash does."""
    cluster = FakeCluster(machines[0].shared / "cluster", machines=machines, environment=ENVIRONMENT)
    number = cluster.create(CONST, *SHORT, "max_restarts=1", paused=True)
    with cluster.reached(6, number):
        trial = cluster.trial(number)
        [checkpoint] = cluster.checkpoints(trial)
        assert set(checkpoint.files) >= RANKS
        machines[0].cut()
        cluster.poll(lambda: "no sign of life from rank 1 (machine1)" in cluster.log(trial))
        machines[0].plug_in()
        cluster.poll(lambda: bool(cluster.starts(trial)[-1].endTime))
    [trial] = cluster.wait(number)
    assert (trial.restarts, len(cluster.starts(trial))) == (1, 2)
    assert f"resumed at batch {checkpoint.batch} of" in cluster.log(trial)
    here = metrics_of(run_here(CONST, *SHORT))
    assert cluster.metrics(trial)["validation"][-1] == here["validation"][-1]
    cluster.close()
