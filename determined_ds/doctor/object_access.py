"""Whether ``checkpoint_storage`` takes a small object, gives it back and deletes it, within a bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from determined_ds.doctor.diagnosis import MISSING, OK, UNKNOWN, Diagnosis
from determined_ds.doctor.surroundings import Host

STORAGE_S = 60.0
PROBE = "determined_ds.train.master.probe"
# For messages: none of these is a secret.
SHOWN = (
    "bucket",
    "container",
    "prefix",
    "endpoint_url",
    "account_url",
    "host_path",
    "storage_path",
    "container_path",
)
FIXES = {
    "s3": "see that bucket and endpoint_url are right and reachable from here (a proxy, a firewall), and that the "
    "credentials may put, get, list and delete objects",
    "gcs": "see that the bucket is there, and that GOOGLE_APPLICATION_CREDENTIALS names an account that may use it",
    "azure": "see that the container is there, and connection_string or account_url with credential",
}
FOLDER = "see that the folder is there, is mounted, and may be written to by this user"
# One attempt: a run tries longer.
PATIENCE = {"AWS_MAX_ATTEMPTS": "1"}


def check_storage(
    host: Host, config: Mapping[str, Any] | None, *, timeout_s: float = STORAGE_S
) -> Diagnosis | None:
    """Write, read and delete an object through Determined's own storage manager.

    Args:
        host: Where to look.
        config: ``checkpoint_storage`` of the experiment; None where it has none, and the cluster's is used.
        timeout_s: For all of it.

    Returns:
        None where there is nothing to check.
    """
    if not config or not config.get("type"):
        return None
    kind = str(config["type"])
    place = f"{kind}: {', '.join(f'{key} {config[key]}' for key in SHOWN if config.get(key))}"
    folder = config.get("container_path") if kind == "directory" else config.get("host_path")
    is_folder = kind in ("shared_fs", "directory")
    if is_folder and not host.in_task and not (folder and Path(str(folder)).is_dir()):
        needed = "a folder of the agents' machines; `det cmd run` checks it there"
        return Diagnosis("storage", UNKNOWN, f"{place} is not on this machine", needed)
    once = replace(host, environment={**PATIENCE, **host.environment})
    wrong = _probe(once, json.dumps(dict(config)), timeout_s)
    if wrong is None:
        return Diagnosis("storage", OK, f"{place}: a small object was written, read, deleted")
    needed = "that a small object can be written, read and deleted"
    return Diagnosis("storage", MISSING, f"{place}: {wrong}", needed, FIXES.get(kind, FOLDER))


def _probe(host: Host, config: str, timeout_s: float) -> str | None:
    """What went wrong; None for nothing. A client that hangs is killed with its threads."""
    with subprocess.Popen(
        [host.python, "-m", PROBE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(host.environment),
        start_new_session=True,
    ) as process:
        try:
            _, complained = process.communicate(config, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"no answer within {timeout_s:.0f} s"
    if process.returncode == 0:
        return None
    lines = complained.strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"
