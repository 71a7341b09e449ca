"""The file system of the run directory: room, and its clock."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from determined_ds.doctor.finding import MISSING, OK, WARNING, Finding
from determined_ds.doctor.machine import Machine, existing
from determined_ds.memory.units import GIB, format_bytes

LEAST_BYTES = GIB  # logs, metrics and a checkpoint of the smallest model
FEW_BYTES = 10 * GIB
SKEW_S = 2.0


def look_at_disk(machine: Machine) -> Finding:
    """Room where the run directory is or will be. How much a checkpoint takes is known after the first."""
    there = existing(machine.run_dir)
    usage = shutil.disk_usage(there)
    found = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} are free in {there}"
    needed = "room for checkpoints: 12 to 16 bytes a parameter each"
    if usage.free >= FEW_BYTES:
        return Finding(name="disk", state=OK, found=found, needed=needed)
    state = WARNING if usage.free >= LEAST_BYTES else MISSING
    fix = "free some, name another --run-dir, or keep fewer checkpoints by fit.save_total_limit"
    return Finding(name="disk", state=state, found=found, needed=needed, fix=fix)


def look_at_clock(machine: Machine) -> Finding:
    """The clock of the run directory's file system, which another machine may keep, against this machine's.

    What is newest is told by the times of files: the newest checkpoint, a lock that nobody writes to.
    """
    there = existing(machine.run_dir)
    needed = f"the machine's time to {SKEW_S:.0f} s: the newest of several files is told by it"
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".doctor-") as file:
            before = machine.clock()
            file.write(b"-")
            file.flush()
            skew = Path(file.name).stat().st_mtime - before
    except OSError as error:
        fix = "name another --run-dir, or have its owner let this user write there"
        found = f"{there} cannot be written to: {error.strerror}"
        return Finding(name="clock", state=MISSING, found=found, needed=needed, fix=fix)
    if abs(skew) <= SKEW_S:
        found = f"the file system of {there} agrees with this machine"
        return Finding(name="clock", state=OK, found=found, needed=needed)
    off = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine"
    fix = "set both by NTP (chronyc, timedatectl set-ntp true)"
    return Finding(
        name="clock", state=WARNING, found=f"the file system of {there} is {off}", needed=needed, fix=fix
    )
