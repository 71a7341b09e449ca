"""The processes of a run: joined without a port, ended together, and none of them left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from determined_ds.launch.ranks import group as module
from determined_ds.launch.ranks import shared_temp
from determined_ds.launch.ranks.failures import words_of
from determined_ds.launch.ranks.group import Ranks
from determined_ds.launch.ranks.process import Failure
from determined_ds.launch.ranks.run_ranks import Outcome
from determined_ds.launch.ranks.shared_temp import SharedTemp
from determined_ds.protocol.handed_on import STORE
from determined_ds.protocol.run_dir import RunDir
from tests.command import ROOT
from tests.launch.test_trial_process import experiment, process_in, until

LOOPBACK = ("127.0.0.1", "::1")


def two(script: str, folder: Path) -> Ranks:
    """Two ranks that run a script of the shell; ``$PYTHON`` is this Python."""
    (folder / "logs").mkdir()
    environment = {**os.environ, "PYTHON": sys.executable, "LOCAL_SIZE": "7", "MASTER_PORT": "1"}
    return Ranks(["sh", "-c", script], size=2, environment=environment, cwd=folder, run_dir=RunDir(folder))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.2)


@pytest.mark.programs
def test_no_port_of_a_run_is_open_to_other_machines(tmp_path: Path) -> None:
    """Of any of its processes, while two ranks train; torch's own launcher and its store bind every interface."""
    process = process_in(tmp_path, experiment(slots=2))
    process.start()
    try:
        until(lambda: process.new_metrics() or process.poll() is not None)
        assert process.poll() is None, process.output()
        assert process._process is not None
        launcher = psutil.Process(process._process.pid)
        found = {each.pid: listening(each) for each in [launcher, *launcher.children(recursive=True)]}
    finally:
        process.kill()
    assert found.pop(launcher.pid) == [], (
        "the launcher listens to nobody: nothing that it reads came by a port"
    )
    assert any(found.values()), "ranks listen for one another"
    assert {address for addresses in found.values() for address in addresses} <= set(LOOPBACK)


def listening(process: psutil.Process) -> list[str]:
    sockets = process.net_connections(kind="inet")
    return [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN or not each.raddr]


def test_each_rank_knows_its_place_and_not_that_of_the_shell(tmp_path: Path) -> None:
    words = "$RANK $LOCAL_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_SIZE on $CROSS_RANK of $CROSS_SIZE"
    with two(f"echo {words} at=$MASTER_PORT > place$RANK; echo ${STORE} > store", tmp_path) as ranks:
        assert ranks.wait() == []
        store = Path((tmp_path / "store").read_text().strip())
        assert store.parent.stat().st_mode & 0o777 == 0o700
    places = [(tmp_path / f"place{rank}").read_text() for rank in (0, 1)]
    assert places == ["0 0 of 2 2 2 on 0 of 1 at=\n", "1 1 of 2 2 2 on 0 of 1 at=\n"]
    assert not store.parent.exists()


@pytest.mark.usefixtures("short_grace")
def test_when_one_fails_the_others_are_ended_and_it_is_the_first(tmp_path: Path) -> None:
    script = "[ $RANK = 0 ] && exec sleep 600; echo its last line; kill -KILL $$"
    with two(script, tmp_path) as ranks:
        first, other = ranks.wait()
    assert (first.rank, first.code, first.ended_by_us) == (1, -signal.SIGKILL, False)
    last = "the last lines of its log:\nits last line"
    assert words_of(first).startswith(f"{last}\n\nit ended without a message: killed by SIGKILL")
    assert (other.rank, other.code, other.ended_by_us) == (0, -signal.SIGKILL, True)


def test_words_are_heard_whatever_their_length(tmp_path: Path) -> None:
    """By a pipe, which holds 64 KiB; no file has to be written."""
    script = (
        "$PYTHON -c 'from determined_ds.protocol.handed_on import report_failure; import os;"
        ' report_failure(os.environ["RANK"] * 10**6, 2, cause="error", reason="")\'; exit 2'
    )
    with two(script, tmp_path) as ranks:
        failures = ranks.wait()
    assert {failure.rank: set(failure.message) for failure in failures} == {0: {"0"}, 1: {"1"}}
    assert all((len(each.message), each.exit_code) == (10**6, 2) for each in failures)
    assert failures == sorted(failures, key=lambda failure: failure.time)


def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    with two("sleep 600 & echo $! > started$RANK", tmp_path) as ranks:
        assert ranks.wait() == []
    for rank in (0, 1):
        pid = int((tmp_path / f"started{rank}").read_text())
        until(
            lambda pid=pid: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        )


def test_ranks_end_when_they_are_left(tmp_path: Path) -> None:
    with two("sleep 600", tmp_path) as ranks:
        pids = [rank.pid for rank in ranks._ranks]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids)


LAUNCHER = """
import os, sys, tempfile, time
from pathlib import Path
from determined_ds.launch.ranks.group import Ranks
from determined_ds.protocol.run_dir import RunDir
tempfile.tempdir = sys.argv[1]
with Ranks(["sleep", "600"], size=1, environment=dict(os.environ), cwd=Path("."), run_dir=RunDir(Path("."))) as ranks:
    print(ranks.pids[0], flush=True)
    time.sleep(600)
"""


def test_what_a_killed_launcher_leaves_is_cleared_away_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before its ranks have ended."""
    monkeypatch.setattr(shared_temp, "YOUNG_S", 0.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        launcher.kill()
    [left] = tmp_path.iterdir()
    first = SharedTemp()
    assert left.exists()
    os.killpg(rank, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE)
    second = SharedTemp()
    assert set(tmp_path.iterdir()) == {first.folder, second.folder}
    for place in (first, second):
        place.remove()
    assert list(tmp_path.iterdir()) == []


def test_exit_codes() -> None:
    def failed(code: int, exit_code: int | None = None) -> tuple[Failure, ...]:
        return (Failure(rank=0, code=code, exit_code=exit_code, time=0.0),)

    assert Outcome().exit_code == 0
    assert Outcome(failures=failed(2, 2)).exit_code == 2
    assert Outcome(failures=failed(2)).exit_code == 1, (
        "a rank's own code 2, without a message, is not a configuration's"
    )
    assert Outcome(failures=failed(-9)).exit_code == 1
    assert Outcome(signals=(15,)).exit_code == 0
    assert Outcome(signals=(15,), failures=failed(-15)).exit_code == 0, "it could not handle it yet"
    assert Outcome(signals=(15, 2), failures=failed(-9)).exit_code == 130
    assert Outcome(signals=(15,), failures=failed(1)).exit_code == 1
