"""A container is had, or the reason why not; and it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import agent
from tests.ranks import ROOT

# Prints the cluster's name once a trial's container is up.
SESSION = """
import sys, time
from pathlib import Path
from tests.cluster.cluster import Cluster
with Cluster(Path(sys.argv[1])) as cluster:
    number = cluster.create("experiments/gpt2/const.yaml")
    cluster.wait_for(lambda: cluster.trial(number).allocations[0].ready)
    print(cluster.master.cluster_id, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("way", ["false", "no such command"])
def test_where_no_container_can_be_had_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(agent, "WAYS", ([way],))
    monkeypatch.setattr(agent, "_found", [])
    reason = agent.why_not()
    assert reason is not None
    assert reason.startswith("no private mount can be had: ")
    assert way in reason


def test_where_it_can_be_had_there_is_no_reason() -> None:
    if reason := agent.why_not():
        pytest.skip(reason)
    assert agent.way_to_isolate() in agent.WAYS


def test_of_a_session_that_is_killed_no_container_is_left(tmp_path: Path) -> None:
    """Neither the cluster's close nor any other code of the session gets to run."""
    if reason := agent.why_not():
        pytest.skip(reason)
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert session.stdout is not None
    cluster_id = session.stdout.readline().strip()
    assert agent.marked("DET_CLUSTER_ID", cluster_id)
    session.kill()
    session.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while left := agent.marked("DET_CLUSTER_ID", cluster_id):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
