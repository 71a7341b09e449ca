"""Under ``determined.launch.deepspeed`` in place of the templates' launcher a trial is the same.

Determined ends this launcher 5 seconds after its ranks (``--grace-period`` in determined 0.38.1's
``launch/deepspeed.py``). Where a busy machine takes longer, a trial that has ended well is started again, and finds
nothing left to train: so these tests allow more restarts than they cause.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.agent import why_not
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere
from tests.cluster.test_killed import nth_allocation, ranks_of

CONST = "experiments/gpt2/const.yaml"
LAUNCHED = (
    *SHORT,
    "entrypoint=python3 -m determined.launch.deepspeed "
    "python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial",
)


@pytest.mark.long("Determined's other launcher, three starts; launch/test_deepspeed has ours around it")
def test_paused_and_killed_it_ends_as_if_it_never_was(
    cluster: Cluster, run_here: Callable[[str], RunHere]
) -> None:
    number = cluster.create(CONST, *LAUNCHED, "max_restarts=5", paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 1)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 2)
    cluster.pause(number, held)
    assert trial.state == "PAUSED"
    assert trial.allocations[0].acked

    cluster.activate(number)
    second = nth_allocation(cluster, trial, 2)
    cluster.poll(lambda: len(ranks_of(second)) == 2)
    os.kill(ranks_of(second)["1"], signal.SIGKILL)

    cluster.wait(number)
    assert trial.state == "COMPLETED"
    assert trial.restarts >= 1
    assert second.exit_code != 0
    expected = run_here(CONST).metrics
    for group in ("training", "validation"):
        assert cluster.metrics(trial, group) == expected[group]


@pytest.mark.long("two trials at once; launch/test_deepspeed has one start")
def test_two_trials_train_on_one_host_network_at_once(tmp_path: Path) -> None:
    """Of both, DeepSpeed's launcher would have the ranks meet at port 29500. Started by ours, around Determined's."""
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path, slots=4) as cluster:
        launched = [*LAUNCHED[:-1], LAUNCHED[-1].replace("determined.launch", "determined_ds.launch")]
        numbers = [cluster.create(CONST, *launched, "max_restarts=5", paused=True) for _ in range(2)]
        trials = [cluster.trial(number) for number in numbers]
        held = [cluster.hold_at_report(trial, 1) for trial in trials]
        for number in numbers:
            cluster.activate(number)
        for trial in trials:
            cluster.wait_for_report(trial, "training", 2)
        assert all(trial.running for trial in trials)
        for gate in held:
            gate.set()
        for number in numbers:
            cluster.wait(number)
        for trial in trials:
            assert "EADDRINUSE" not in cluster.log(trial)
