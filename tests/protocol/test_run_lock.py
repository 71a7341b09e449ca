"""A run directory has one writer, which is named to the second one, and is private to its user."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from determined_ds.errors import ConfigError
from determined_ds.protocol import run_lock
from determined_ds.protocol.run_dir import RunDir
from determined_ds.protocol.run_lock import RunLock, check_run_dir
from tests.command import ROOT, processes_of
from tests.launch.test_trial_process import experiment, process_in, until

HOLDER = """
import signal, subprocess, sys
from pathlib import Path
from determined_ds.protocol.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[lock.fileno()])
print(child.pid, flush=True)
signal.pause()
"""


class Holder:
    """A process that holds a run directory, with a child that inherits the lock."""

    def __init__(self, run_dir: Path, child_s: str) -> None:
        words = [sys.executable, "-c", HOLDER, str(run_dir), child_s]
        self.process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def holders() -> Iterator[list[Holder]]:
    started: list[Holder] = []
    yield started
    for holder in started:
        holder.kill()
        os.kill(holder.child, signal.SIGKILL)


def refused(run_dir: Path) -> str:
    for attempt in (lambda: RunLock(run_dir).release(), lambda: check_run_dir(run_dir)):
        with pytest.raises(ConfigError) as raised:
            attempt()
    return str(raised.value)


def test_a_second_writer_is_refused_with_the_first_ones_process_id(
    tmp_path: Path, holders: list[Holder]
) -> None:
    holders.append(Holder(tmp_path / "run", "600"))
    assert f"process {holders[0].process.pid} is writing to it" in refused(tmp_path / "run")
    check_run_dir(tmp_path)
    RunLock(tmp_path / "other").release()


def test_it_is_held_by_those_that_its_writer_leaves_behind(
    tmp_path: Path, holders: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a launcher that is killed may write for a moment yet."""
    monkeypatch.setattr(run_lock, "LEFT_S", 0.2)
    holders.append(Holder(tmp_path, "600"))
    holders[0].kill()
    assert "is writing to it" in refused(tmp_path)


def test_who_comes_next_waits_until_they_have_ended(tmp_path: Path) -> None:
    holder = Holder(tmp_path, "1")
    holder.kill()
    with RunLock(tmp_path):
        assert str(os.getpid()) in RunDir(tmp_path).lock.read_text()
    RunLock(tmp_path).release()


def test_folders_that_are_made_are_for_their_user_only(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        RunLock(tmp_path / "shared" / "runs" / "name" / "run").release()
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "shared").rglob("*") if path.is_dir()]
    assert modes == [0o700] * 3
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755, "what the user has made stays as it was"


@pytest.mark.long("a whole run; the tests before have the lock and who inherits it")
def test_a_run_holds_its_directory_and_so_do_its_ranks(tmp_path: Path) -> None:
    """Also against search, compare and autotune, which take the same lock."""
    process = process_in(tmp_path, experiment(slots=2))
    process.start()
    try:
        until(lambda: process.new_metrics() or process.poll() is not None)
        assert process.poll() is None, process.output()
        assert process._process is not None
        pid = process._process.pid
        for command in ("run", "search", "compare --strategies zero1", "autotune --budget 2"):
            name, *more = command.split()
            given = (tmp_path / "run" / "given.yaml", tmp_path, "--run-dir", tmp_path / "run")
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "determined_ds.cli",
                    name,
                    *map(str, given),
                    "--accelerator",
                    "cpu",
                    *more,
                ],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 2, (command, done.stdout, done.stderr)
            assert f"process {pid} is writing to it" in done.stderr, command
            assert "Traceback" not in done.stderr
        os.kill(pid, signal.SIGKILL)
    finally:
        process.kill()
    RunLock(tmp_path / "run").release()
    assert not processes_of(tmp_path / "run")
