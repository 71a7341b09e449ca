"""A trial over two agents, each on a machine of its own, trains as one on a single machine does, to the last digit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest

from determined_ds.protocol.handed_on import HANG_TIMEOUT
from tests.cluster.agent import why_not
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere
from tests.launch.test_trial_process import until
from tests.machines import Machine

pytestmark = pytest.mark.long("two machines with an agent each; test_as_rank has two machines under torchrun")

CONST = "experiments/gpt2/const.yaml"
# An S3 server on a machine: what it says in JSON is the ``checkpoint_storage`` for it.
S3 = """
import json, signal, sys
from tests.object_storage import s3_server

with s3_server(sys.argv[1]) as storage:
    print(json.dumps(storage), flush=True)
    signal.pause()
"""


def test_paused_and_activated_it_ends_as_on_one_machine(
    machines: tuple[Machine, Machine], run_here: Callable[[str], RunHere]
) -> None:
    """With checkpoints in object storage: neither machine sees what the other writes, or fetches to its ``/tmp``."""
    if reason := why_not():
        pytest.skip(reason)
    said = machines[0].shared / "s3.txt"
    server = machines[0].start([sys.executable, "-c", S3, machines[0].address], output=said)
    until(lambda: server.poll() is not None or "}" in said.read_text())
    stored = next(json.loads(line) for line in said.read_text().splitlines() if line.startswith("{"))
    where = [f"checkpoint_storage.{key}={value}" for key, value in stored.items()]
    # As many threads a rank as on one machine, by which the last digits go.
    threads = {"OMP_NUM_THREADS": "1"}
    with Cluster(machines[0].shared / "cluster", machines=machines, environment=threads) as cluster:
        number = cluster.create(CONST, *SHORT, *where, paused=True)
        trial = cluster.trial(number)
        held = cluster.hold_at_report(trial, 1)
        cluster.activate(number)
        cluster.wait_for_report(trial, "training", 2)
        cluster.pause(number, held)
        assert (trial.state, trial.allocations[0].exit_code) == ("PAUSED", 0), cluster.log(trial)
        cluster.activate(number)
        cluster.wait(number)
        assert (trial.state, trial.run_id, trial.restarts) == ("COMPLETED", 2, 0)
        assert len(trial.allocations[1].addresses) == 2
        expected = run_here(CONST).metrics
        for group in ("training", "validation"):
            assert cluster.metrics(trial, group) == expected[group]
        ranks = {f"det_state_dict_rank{rank}.pth" for rank in (0, 1)}
        for checkpoint in cluster.checkpoints(trial):
            assert ranks <= set(checkpoint.body["resources"])


def test_a_cut_cable_is_reported_and_the_restart_resumes_from_the_shared_folder(
    machines: tuple[Machine, Machine], run_here: Callable[[str], RunHere]
) -> None:
    """The rank that the master still hears of names the one that it no longer hears of, and exits as a crash does."""
    if reason := why_not():
        pytest.skip(reason)
    environment = {"OMP_NUM_THREADS": "1", HANG_TIMEOUT: "0.1"}
    with Cluster(machines[0].shared / "cluster", machines=machines, environment=environment) as cluster:
        number = cluster.create(CONST, *SHORT, "max_restarts=1", paused=True)
        trial = cluster.trial(number)
        held = cluster.hold_at_report(trial, 3)
        cluster.activate(number)
        cluster.wait_for_report(trial, "training", 6)
        [checkpoint] = cluster.checkpoints(trial)
        assert {f"det_state_dict_rank{rank}.pth" for rank in (0, 1)} <= set(checkpoint.body["resources"])
        machines[0].cut()
        cluster.wait_for(lambda: "no sign of life from rank 1 (machine1)" in cluster.log(trial))
        machines[0].plug_in()
        cluster.wait_for(lambda: trial.allocations[0].exit_code is not None)
        held.set()
        cluster.wait(number)
        assert (trial.state, trial.run_id, trial.restarts) == ("COMPLETED", 2, 1)
        assert f"resumed at batch {checkpoint.steps} of" in cluster.log(trial)
        assert cluster.metrics(trial, "validation")[-1] == run_here(CONST).metrics["validation"][-1]
