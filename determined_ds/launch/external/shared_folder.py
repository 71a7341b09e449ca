"""Checks that all machines see the same run directory. Loads no torch."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from pathlib import Path

from determined_ds.errors import Problem
from determined_ds.rundir.run_dir import EXPERIMENT, RunDir

TOKEN = ".shared-"
# NFS caches attributes up to 60 s (acregmax, acdirmax); a name that was never looked up is seen at once.
SEEN_WITHIN_S = 75.0
NEW_WITHIN_S = 5.0


def write_token(run_dir: Path) -> str:
    """Write a file that no other folder has. Returns its name."""
    name = TOKEN + uuid.uuid4().hex
    (run_dir / name).touch()
    return name


def remove_tokens(run_dir: Path) -> None:
    """Remove what :func:`write_token` left there, now or in a launch that was killed."""
    for path in run_dir.glob(f"{TOKEN}*"):
        path.unlink(missing_ok=True)


def digest_of(run_dir: Path) -> str:
    """A checksum of the experiment that ranks read; "" where there is none."""
    try:
        there = RunDir(run_dir)
        return hashlib.sha256(there.current(there.experiment).read_bytes()).hexdigest()
    except OSError:
        return ""


def unseen(run_dir: Path, token: str, digest: str) -> str:
    """What of another machine's cannot be read here, in words; "" where all of it can.

    Args:
        run_dir: The run directory.
        token: The name that :func:`write_token` returned there.
        digest: What :func:`digest_of` returned there.
    """
    begun = time.monotonic()
    while not os.path.exists(run_dir / token):  # False also without permission
        if time.monotonic() - begun > NEW_WITHIN_S:
            return f"does not see what rank 0 wrote to {run_dir}"
        time.sleep(0.1)
    while digest_of(run_dir) != digest:
        if time.monotonic() - begun > SEEN_WITHIN_S:
            return f"reads another {EXPERIMENT} in {run_dir} than rank 0 wrote"
        time.sleep(0.2)
    return ""


def not_shared(run_dir: str, problems: list[str]) -> Problem:
    """The problem of a run directory that is not the same on all machines.

    Args:
        run_dir: As the user knows it.
        problems: Of each machine, its name first.
    """
    return Problem(
        key="--run-dir",
        value=run_dir,
        message=f"must be shared by all machines: {'; '.join(problems)}",
        fix="give a --run-dir on a file system that every machine mounts at the same path (NFS, Lustre)",
        code="run-dir-not-shared",
    )
