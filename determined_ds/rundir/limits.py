"""What a process may use, and whether a disk is full that a run writes to. Loads no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from determined_ds.memory.units import format_bytes
from determined_ds.rundir.run_dir import RunDir, existing

SHARED_MEMORY = Path("/dev/shm")
# Of torch, which does not say which error of the system it was.
ON_DISK = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
WRITES_FAIL = re.compile(r"PytorchStreamWriter failed|inline_container|file write failed|unexpected pos")
FULL_BYTES = 2**20  # what torch's writers could not write was larger
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
    """Say that a disk is full, how much room it has, and what to do; None where it was something else.

    Python and torch say themselves which other resource has run out: shared memory, open files.

    Args:
        error: What was raised; what it was raised from counts too.
        run_dir: Of the run.
    """
    for each in chain(error):
        text, file = str(each), getattr(each, "filename", None)
        is_full = getattr(each, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or bool(ON_DISK.search(text))
        in_shared_memory = str(SHARED_MEMORY) in text or "</torch_" in text
        if (is_full and not in_shared_memory) or (
            WRITES_FAIL.search(text) and shutil.disk_usage(existing(run_dir)).free < FULL_BYTES
        ):
            # num_cores is asked for where nothing else is loaded.
            from determined_ds.checkpoints.files import checkpoints_in

            path, kept = Path(str(file)) if file else run_dir, checkpoints_in(RunDir(run_dir).checkpoints)
            last = f"the last checkpoint is {kept[0].path}" if kept else "no checkpoint was made yet"
            return (
                f"error: no space left on the disk of {path}: {room_in(existing(path))}; {last}\n"
                "  fix: free some space, or keep fewer checkpoints by fit.save_total_limit; then add --resume"
            )
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


def leave_reporting_to_main_thread(run_dir: Path) -> None:
    """From now on a thread that finds the disk full (TensorBoard's writer) prints no traceback.

    The main thread meets the same error, and raises it.
    """
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or exhausted(args.exc_value, run_dir) is None:
            before(args)

    threading.excepthook = hook
