"""Whether what one machine writes to the run directory is what the others read there. Loads no torch."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from pathlib import Path

from determined_ds.errors import Problem
from determined_ds.protocol.laid_aside import current
from determined_ds.protocol.run_dir import EXPERIMENT

TOKEN = ".shared-"
# A file of another machine's may be seen as late as NFS caches attributes (acregmax, acdirmax: 60 s); one that nobody
# has asked for before is seen at once.
SEEN_WITHIN_S = 75.0
NEW_WITHIN_S = 5.0


def write_token(run_dir: Path) -> str:
    """Leave a file that no other folder has. Returns its name."""
    name = TOKEN + uuid.uuid4().hex
    (run_dir / name).touch()
    return name


def remove_tokens(run_dir: Path) -> None:
    """Remove what :func:`write_token` left there, now or in a start that was killed."""
    for path in run_dir.glob(f"{TOKEN}*"):
        path.unlink(missing_ok=True)


def digest_of(run_dir: Path) -> str:
    """Of the experiment that ranks read; "" where there is none."""
    try:
        return hashlib.sha256(current(run_dir, EXPERIMENT).read_bytes()).hexdigest()
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
    while not os.path.exists(run_dir / token):  # False also where it may not be looked at
        if time.monotonic() - begun > NEW_WITHIN_S:
            return f"does not see what rank 0 wrote to {run_dir}"
        time.sleep(0.1)
    while digest_of(run_dir) != digest:
        if time.monotonic() - begun > SEEN_WITHIN_S:
            return f"reads another {EXPERIMENT} in {run_dir} than rank 0 wrote"
        time.sleep(0.2)
    return ""


def not_shared(run_dir: str, problems: list[str]) -> Problem:
    """The problem of a run directory that is not one for all machines.

    Args:
        run_dir: As the user knows it.
        problems: What each machine says, its name first.
    """
    return Problem(
        key="--run-dir",
        value=run_dir,
        message=f"is not shared by the machines: {'; '.join(problems)}. Checkpoints need one folder for all of them",
        fix="give a --run-dir on a file system that every machine mounts at the same path (NFS, Lustre)",
        code="run-dir-not-shared",
    )
