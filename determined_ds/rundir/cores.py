"""The CPU cores that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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
