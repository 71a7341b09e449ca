"""Locks that killed builds of torch's extensions leave: found, told from held ones, removed where that is safe."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from determined_ds.doctor import extension_locks
from determined_ds.doctor.extension_locks import locks_left, remove_stale

HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "torch_extensions"
    (folder / "py311_cu130/cpu_adam").mkdir(parents=True)
    return folder


@pytest.fixture
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that builds: it holds torch's own lock."""
    lock = root / "py311_cu130/cpu_adam/lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_build_that_goes_on_keeps_its_lock_and_one_that_was_killed_loses_it(
    root: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own lock; the next build would wait for it for ever."""
    lock = root / "py311_cu130/cpu_adam/lock"
    assert locks_left(root, now=time.time()) == []
    assert remove_stale(root, now=time.time()) == []
    holder.kill()
    holder.wait()
    assert lock.exists()
    monkeypatch.setattr(extension_locks, "_sees_every_holder", lambda _: True)
    (left,) = locks_left(root, now=time.time())
    assert (left.path, left.is_stale) == (lock, True)
    (said,) = remove_stale(root, now=time.time())
    assert said.startswith(f"removed {lock}, the lock of a build that was killed")
    assert not lock.exists()


def test_where_others_could_build_a_lock_stays_until_nothing_was_written_for_long(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of several machines, or in a container beside others."""
    monkeypatch.setattr(extension_locks, "_sees_every_holder", lambda _: False)
    lock = root / "py311_cu130/cpu_adam/lock"
    lock.touch()
    now = lock.stat().st_mtime
    (said,) = remove_stale(root, now=now + 60)
    assert lock.exists()
    assert "another machine or container may" in said
    assert said.endswith(f"fix: if no other process builds it, rm {lock}")
    object_file = lock.with_name("cpu_adam.o")  # a compiler wrote just now
    object_file.touch()
    os.utime(object_file, (now + 7200, now + 7200))
    assert len(remove_stale(root, now=now + 7200 + 60)) == 1
    assert lock.exists()
    (removed,) = remove_stale(root, now=now + 7200 + 3601)
    assert "nothing was written for 60 minutes" in removed
    assert not lock.exists()
