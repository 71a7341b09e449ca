"""What a process may use of its machine, and whether that has run out. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from determined_ds.memory.units import format_bytes
from determined_ds.rundir.run_dir import existing

SHARED_MEMORY = Path("/dev/shm")
FULL = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
FILES = re.compile(r"Too many open files")
IN_MEMORY = re.compile(rf"{SHARED_MEMORY}|</torch_")  # which torch says itself
MOST_FILES = 2**16
# What a container may use of the cores that it sees, in microseconds of a period: cgroups of version 2 and 1.
CPU_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def num_cores() -> int:
    """CPU cores that this process may use: those of its affinity, and no more than its container is granted."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in CPU_QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # "max": no quota
            quota, period = map(int, " ".join(Path(file).read_text() for file in files).split())
            if quota > 0:  # -1: no quota in version 1
                return max(1, min(cores, quota // period))
    return cores


def allow_open_files() -> None:
    """Raise the limit of open files of this process and its children as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def exhausted(error: BaseException, run_dir: Path) -> str | None:
    """Say that a disk, shared memory or the limit of open files is used up, and what to do; None: it is something else.

    Another start would fail in the same way. Any library may say it, in an error that led to another.
    """
    for each in chain(error):
        if FILES.search(str(each)):
            return (
                f"error: too many open files\n  fix: allow more, by ulimit -n {MOST_FILES}, then add --resume"
            )
        if FULL.search(str(each)):
            named = getattr(each, "filename", None)
            folder = SHARED_MEMORY if IN_MEMORY.search(str(each)) else existing(Path(str(named or run_dir)))
            fix = "free some space, or keep fewer checkpoints by fit.save_total_limit"
            if folder == SHARED_MEMORY:
                fix = "give the container more (docker run --shm-size), or take fewer num_workers"
            return f"error: no space left on the disk of {folder}: {room_in(folder)}\n  fix: {fix}; then add --resume"
    return None


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from or while."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def room_in(folder: Path) -> str:
    """How much room a file system has, in words.

    Raises:
        OSError: there is no such folder.
    """
    usage = shutil.disk_usage(folder)
    return f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free"
