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
from determined_ds.doctor.before_ranks import freed_locks
from determined_ds.doctor.extension_locks import locks_left, remove_stale, root_of_extensions
from determined_ds.doctor.surroundings import Host
from tests.making import CPU, decide

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


def test_the_certainty_is_that_of_this_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = root / "py311_cu130/cpu_adam/lock"
    lock.touch()
    monkeypatch.setattr(extension_locks, "FIRST_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)
    assert extension_locks._sees_every_holder(lock)
    for kind in ("nfs4", "fuse.sshfs", "lustre"):
        mount = type("Mount", (), {"mountpoint": "/", "fstype": kind})
        monkeypatch.setattr(extension_locks.psutil, "disk_partitions", lambda all, mount=mount: [mount])
        assert not extension_locks._sees_every_holder(lock)


def test_locks_are_looked_for_where_torch_builds(tmp_path: Path) -> None:
    # In a process of its own: setuptools refuses to be loaded where somebody has loaded Python's own distutils.
    ask = "from torch.utils.cpp_extension import get_default_build_root as root; print(root())"
    torchs = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert root_of_extensions(os.environ) == Path(os.environ.get("TORCH_EXTENSIONS_DIR") or torchs.strip())
    assert root_of_extensions({"TORCH_EXTENSIONS_DIR": "/a"}) == Path("/a")
    assert root_of_extensions({"HOME": "/h"}) == Path("/h/.cache/torch_extensions")
    assert root_of_extensions({"HOME": "/h", "XDG_CACHE_HOME": "/x"}) == Path("/x/torch_extensions")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/lock").touch()  # with TORCH_EXTENSIONS_DIR there is no folder of a Python between
    assert [left.path.parent.name for left in locks_left(tmp_path, now=time.time())] == ["cpu_adam"]


def test_only_what_builds_something_looks_for_locks(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_locks, "_sees_every_holder", lambda _: True)
    lock = root / "py311_cu130/cpu_adam/lock"
    lock.touch()
    here = Host(environment={"TORCH_EXTENSIONS_DIR": str(root)})
    assert freed_locks(decide(accelerator=CPU), here) == []
    assert lock.exists()
    offload = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": False}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    assert len(freed_locks(decide(ds=offload, accelerator=CPU), here)) == 1
    assert not lock.exists()
