"""What processes share and are granted: shared memory, memory, open files, room on the disk and its clock."""

from __future__ import annotations

import resource
import shutil
import tempfile
from pathlib import Path

import psutil

from determined_ds.doctor.diagnosis import MISSING, OK, WARNING, Diagnosis, diagnosis
from determined_ds.doctor.surroundings import Host
from determined_ds.memory.units import GIB, MIB, format_bytes
from determined_ds.rundir.handed_on import count
from determined_ds.rundir.limits import room_in
from determined_ds.rundir.run_dir import existing

# Docker's default of /dev/shm is 64 MiB, for all processes together; with less than 8 MiB each, ranks end at once.
SHARED_EACH, SHARED_LEAST = 64 * MIB, 8 * MIB
RANK_BYTES = int(0.7 * GIB)  # of torch and DeepSpeed, before a model; measured
FILES = 4096
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
LEAST_BYTES = GIB  # logs, metrics and a checkpoint of the smallest model
FEW_BYTES = 10 * GIB
SKEW_S = 2.0


def check_shared_memory(host: Host, *, ranks: int, workers: int) -> Diagnosis:
    """Room for the batches that loaders' workers pass to ranks.

    Args:
        host: Where to look.
        ranks: On this machine.
        workers: Of each rank's loaders.
    """
    processes = ranks * (1 + workers)
    needed = (
        f"{format_bytes(SHARED_EACH * processes)} for {count(ranks, 'rank')} of {count(workers, 'worker')}"
    )
    try:
        free = shutil.disk_usage(host.shared_memory).free
    except OSError as error:
        found = f"{host.shared_memory}: {error.strerror}"
        return Diagnosis("shared memory", MISSING, found, needed, "mount a tmpfs there")
    fix = "make it larger: docker run --shm-size 8g, resources.shm_size on a cluster; or use fewer loader workers"
    found = f"{room_in(host.shared_memory)} in {host.shared_memory}"
    state = _enough(free, SHARED_EACH * processes, SHARED_LEAST * processes)
    return diagnosis("shared memory", state, found, needed, fix)


def _enough(number: int, wanted: int, least: int) -> str:
    return OK if number >= wanted else WARNING if number >= least else MISSING


def check_memory(*, ranks: int, limit_files: tuple[str, ...] = MEMORY_LIMITS) -> Diagnosis:
    """Memory that is left to this container. ``det-ds check --memory`` computes what a model takes."""
    free = psutil.virtual_memory().available
    granted = min((limit for limit in map(_limit, limit_files) if limit is not None), default=None)
    found = f"{format_bytes(free)} are available"
    if granted is not None and granted < psutil.virtual_memory().total:
        found += f", and this container may have {format_bytes(granted)}"
        free = min(free, granted)
    needed = f"{format_bytes(RANK_BYTES * ranks)} for {count(ranks, 'rank')} before any model"
    state = _enough(free, RANK_BYTES * ranks, 0)
    return diagnosis("memory", state, found, needed, "free some, or use fewer slots")


def _limit(file: str) -> int | None:
    try:
        return int(Path(file).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def check_open_files(*, limits: tuple[int, int] | None = None) -> Diagnosis:
    """How many files a process may open; a run raises its own limit as far as it may.

    Args:
        limits: The soft and the hard one; those of this process if None.
    """
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Diagnosis("open files", OK, f"{soft}, and no hard limit")
    fix = "ulimit -Hn 65536 by root, or LimitNOFILE= of the service, or docker run --ulimit nofile=65536"
    found, needed = f"{soft}, and at most {hard}", f"{FILES}, where loaders have workers"
    return diagnosis("open files", _enough(hard, FILES, 0), found, needed, fix)


def check_disk(host: Host) -> Diagnosis:
    """Room where the run directory is or will be. The size of a checkpoint is known after the first."""
    there = existing(host.run_dir)
    fix = "free some, name another --run-dir, or keep fewer checkpoints by fit.save_total_limit"
    needed = "room for checkpoints: 12 to 16 bytes a parameter each"
    state = _enough(shutil.disk_usage(there).free, FEW_BYTES, LEAST_BYTES)
    return diagnosis("disk", state, f"{room_in(there)} in {there}", needed, fix)


def check_clock(host: Host) -> Diagnosis:
    """The clock of the run directory's file system, which another machine may keep, against this machine's.

    File times decide which checkpoint is the newest, and whether a lock is still written to.
    """
    there = existing(host.run_dir)
    needed = f"the machine's time to {SKEW_S:.0f} s: file times decide which checkpoint is the newest"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor-") as file:
            before = host.clock()
            file.write(b"-")
            file.flush()
            skew = Path(file.name).stat().st_mtime - before
    except OSError as error:
        fix = "name another --run-dir, or have its owner let this user write there"
        return Diagnosis("clock", MISSING, f"{there} cannot be written to: {error.strerror}", needed, fix)
    if abs(skew) <= SKEW_S:
        return Diagnosis("clock", OK, f"the file system of {there} agrees with this machine", needed)
    off = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    fix = "set both by NTP (chronyc, timedatectl set-ntp true)"
    return Diagnosis("clock", WARNING, f"the file system of {there} is {off}", needed, fix)
