"""Abandoned locks of torch's extension builder: the next build of that extension would wait forever.

torch locks the folder of an extension by a file that it creates and keeps open while it builds. A build that is killed
leaves the file, without a process id in it; the next one waits until it is removed. Compilers of the killed build may
still run, since ninja gives each its own process group: they write what the next build writes again before it links.

Source: ``FileBaton`` in torch 2.13's ``torch/utils/file_baton.py``, ``_jit_compile`` in its ``cpp_extension.py``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

LOCK = "lock"
MAX_DEPTH = 3  # root / python and CUDA / extension / lock
# A compiler writes more often, so no build is running, even where processes of others cannot be seen.
QUIET_S = 3600.0
# Of the first namespace of processes: ``PROC_PID_INIT_INO`` in Linux's include/linux/proc_ns.h.
FIRST_PID_NAMESPACE = 0xEFFFFFFC
OF_SEVERAL_MACHINES = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "9p",
    "fuse",
    "virtiofs",
    "afs",
)


@dataclass(frozen=True, kw_only=True)
class Lock:
    """A lock that no process here holds.

    Args:
        path: The file.
        identity: Its device and inode: another build may have released this one and made its own.
        is_stale: Whether it is certain that no process holds it.
        why: What is known of it, in a clause.
    """

    path: Path
    identity: tuple[int, int]
    is_stale: bool
    why: str


def root_of_extensions(environment: Mapping[str, str]) -> Path:
    """Where torch builds. Source: ``_get_build_directory`` in torch 2.13's ``torch/utils/cpp_extension.py``."""
    stated = environment.get("TORCH_EXTENSIONS_DIR")
    if stated:
        return Path(stated)
    home = environment.get("HOME") or os.path.expanduser("~")
    return Path(environment.get("XDG_CACHE_HOME") or Path(home, ".cache")) / "torch_extensions"


def locks_left(root: Path, *, now: float) -> list[Lock]:
    """Every lock below a folder that no process of this machine holds.

    Args:
        root: As :func:`root_of_extensions`.
        now: Seconds, by the clock of the file system.
    """
    # In this order: a holder has opened its lock before the lock is found here.
    found = {path: identity for path in _locks(root) if (identity := _identity(path)) is not None}
    held = _open_files() if found else set()
    return [_judged(path, identity, now) for path, identity in found.items() if identity not in held]


def remove_stale(root: Path, *, now: float) -> list[str]:
    """Remove the stale locks. Returns a line for each lock that no process here holds, removed or not."""
    said = []
    for lock in locks_left(root, now=now):
        if lock.is_stale and _identity(lock.path) == lock.identity:
            with contextlib.suppress(OSError):
                lock.path.unlink()
                said.append(f"removed {lock.path}, the lock of a build that was killed: {lock.why}")
                continue
        said.append(
            f"{lock.path} locks the build of an extension, {lock.why}: ranks that build it wait. "
            f"fix: if no other process builds it, rm {lock.path}"
        )
    return said


def _locks(root: Path) -> Iterator[Path]:
    for depth in range(1, MAX_DEPTH):
        with contextlib.suppress(OSError):
            yield from (path for path in root.glob(f"{'*/' * depth}{LOCK}") if path.is_file())


def _open_files() -> set[tuple[int, int]]:
    """(device, inode) of every file that a process which can be looked into keeps open."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # of another user, or gone
            for entry in os.scandir(folder):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    found.add((status.st_dev, status.st_ino))
    return found


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # just released
        return None
    return status.st_dev, status.st_ino


def _judged(path: Path, identity: tuple[int, int], now: float) -> Lock:
    idle_s = now - _last_written(path, now)
    minutes = f"{idle_s / 60:.0f} minutes"
    if _sees_every_holder(path):
        is_stale, why = True, "no process of this machine holds it"
    elif idle_s >= QUIET_S:
        is_stale, why = True, f"no process here holds it, and nothing was written for {minutes}"
    else:
        is_stale = False
        why = f"which no process here holds; another machine or container may (last written {minutes} ago)"
    return Lock(path=path, identity=identity, is_stale=is_stale, why=why)


def _last_written(path: Path, now: float) -> float:
    """When a file beside a lock was last written; now if unknown."""
    times = []
    with contextlib.suppress(OSError):
        for each in os.scandir(path.parent):
            with contextlib.suppress(OSError):  # removed by a compiler meanwhile
                times.append(each.stat(follow_symlinks=False).st_mtime)
    return max(times, default=now)


def _sees_every_holder(path: Path) -> bool:
    """Whether any process that could hold a file is visible: here, of this user, not in another container."""
    try:
        is_ours = os.geteuid() == 0 or path.stat().st_uid == os.geteuid()
        in_first = os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
        is_of_container = path.stat().st_dev == os.stat("/").st_dev
    except OSError:
        return False
    return is_ours and (in_first or is_of_container) and _is_of_one_machine(path)


def _is_of_one_machine(path: Path) -> bool:
    real = path.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if real.is_relative_to(mount.mountpoint)]
    kind = max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else ""
    return bool(kind) and not kind.startswith(OF_SEVERAL_MACHINES)
