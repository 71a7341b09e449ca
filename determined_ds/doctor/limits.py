"""What processes share and are granted: shared memory, memory, open files."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import psutil

from determined_ds.doctor.finding import MISSING, OK, WARNING, Finding
from determined_ds.doctor.machine import Machine
from determined_ds.memory.units import GIB, MIB, format_bytes

# Docker's default of /dev/shm is 64 MiB, for all processes together; with less than this each, ranks end at once.
SHARED_EACH, SHARED_LEAST = 64 * MIB, 8 * MIB
RANK_BYTES = int(0.7 * GIB)  # of torch and DeepSpeed, before a model; measured
FILES = 4096
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def look_at_shared_memory(machine: Machine, *, ranks: int, workers: int) -> Finding:
    """Room for what ranks and the workers of their loaders hand over.

    Args:
        machine: Where to look.
        ranks: On this machine.
        workers: Of each rank's loaders.
    """
    processes = ranks * (1 + workers)
    needed = (
        f"{format_bytes(SHARED_EACH * processes)} for {_count(ranks, 'rank')} of {_count(workers, 'worker')}"
    )
    try:
        usage = shutil.disk_usage(machine.shared_memory)
    except OSError as error:
        fix = "mount a tmpfs there"
        return Finding(
            name="shared memory",
            state=MISSING,
            found=f"{machine.shared_memory}: {error.strerror}",
            needed=needed,
            fix=fix,
        )
    found = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free in {machine.shared_memory}"
    if usage.free >= SHARED_EACH * processes:
        return Finding(name="shared memory", state=OK, found=found, needed=needed)
    state = WARNING if usage.free >= SHARED_LEAST * processes else MISSING
    fix = "make it larger: docker run --shm-size 8g, resources.shm_size on a cluster; or use fewer loader workers"
    return Finding(name="shared memory", state=state, found=found, needed=needed, fix=fix)


def look_at_memory(*, ranks: int, limit_files: tuple[str, ...] = MEMORY_LIMITS) -> Finding:
    """Memory that is left to this container. What a model takes is for ``det-ds estimate``."""
    free = psutil.virtual_memory().available
    granted = min((limit for limit in map(_limit, limit_files) if limit is not None), default=None)
    found = f"{format_bytes(free)} are available"
    if granted is not None and granted < psutil.virtual_memory().total:
        found += f", and this container may have {format_bytes(granted)}"
        free = min(free, granted)
    needed = f"{format_bytes(RANK_BYTES * ranks)} for {_count(ranks, 'rank')} before any model"
    if free >= RANK_BYTES * ranks:
        return Finding(name="memory", state=OK, found=found, needed=needed)
    return Finding(
        name="memory", state=WARNING, found=found, needed=needed, fix="free some, or use fewer slots"
    )


def _limit(file: str) -> int | None:
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def look_at_open_files(*, limits: tuple[int, int] | None = None) -> Finding:
    """How many files a process may open; a run raises its own limit as far as it may.

    Args:
        limits: The soft and the hard one; those of this process if None.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding(name="open files", state=OK, found=f"{soft}, and as many as are asked for")
    needed = f"{FILES}, where loaders have workers"
    if hard >= FILES:
        return Finding(name="open files", state=OK, found=f"{soft}, and at most {hard}", needed=needed)
    fix = "ulimit -Hn 65536 by root, or LimitNOFILE= of the service, or docker run --ulimit nofile=65536"
    return Finding(name="open files", state=WARNING, found=f"at most {hard}", needed=needed, fix=fix)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
