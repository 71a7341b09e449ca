"""An agent: starts the container of a trial, follows its output, and reports its end to the master.

A container is a private mount namespace (``container.sh``), so that a trial finds the fixed paths that Determined's
harness expects, and leaves nothing behind. Its processes are known by ``DET_ALLOCATION_ID`` in their environment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.state import Allocation, Trial
from tests.harness.forked import marked
from tests.harness.machines import HIDDEN, PYTHON
from tests.harness.ranks import free_port

if TYPE_CHECKING:
    from tests.cluster.master import Master

CONTAINER = Path(__file__).with_name("container.sh")
BIN = Path(sys.executable).parent
SEEN = sorted(folder for folder in PYTHON if folder.startswith(HIDDEN))
# The namespaces of a container: with the right to mount, or with a user namespace that gives it.
WAYS = (["unshare", "-m"], ["unshare", "-U", "-r", "-m"])


class Agent:
    """Starts a container for each run; ``storage`` is the shared file system, ``roots`` an empty folder."""

    def __init__(self, master: Master, *, slots: int, storage: Path, roots: Path) -> None:
        self._master, self.slots, self._storage, self._roots = master, slots, storage, roots
        self._threads: list[threading.Thread] = []

    def start(self, trial: Trial, allocation: Allocation) -> None:
        """Start a trial's container; the master is told when it has ended."""
        root = self._roots / allocation.container
        root.mkdir()
        container = subprocess.Popen(
            [*way_to_isolate(), *map(str, ("bash", CONTAINER, root, self._storage, BIN, *SEEN))],
            env=self._variables(trial, allocation),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._threads.append(started(self._attend, container, trial, allocation))

    def _variables(self, trial: Trial, allocation: Allocation) -> dict[str, str]:
        latest, config = trial.latest, trial.experiment.config
        checkpoint = latest.uuid if latest else trial.warm_start
        stated = config["environment"]["environment_variables"]["cpu"]
        return {
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/run/determined/home",
            "LANG": "C.UTF-8",
            "C10D_PORT": str(free_port()),
            "PYTHONUSERBASE": "/run/determined/pythonuserbase",
            "DET_MASTER": self._master.server.url,
            "DET_CLUSTER_ID": self._master.cluster_id,
            "DET_AGENT_ID": "agent-1",
            "DET_RESOURCES_ID": allocation.container,
            "DET_CONTAINER_ID": allocation.container,
            "DET_SLOT_IDS": json.dumps(list(range(allocation.slots))),
            "DET_TASK_ID": trial.task_id,
            "DET_TASK_TYPE": "TRIAL",
            "DET_ALLOCATION_ID": allocation.id,
            "DET_RESOURCES_TYPE": "docker-container",
            "DET_SESSION_TOKEN": allocation.token,
            "DET_USER_TOKEN": "",
            "DET_USER": trial.experiment.username,
            "DET_USE_TLS": "false",
            "DET_SEGMENT_ENABLED": "false",
            "DET_WORKDIR": "/run/determined/workdir",
            "DET_RUN_DIR": "/run/determined",
            "DET_TRIAL_ID": str(trial.id),
            "DET_EXPERIMENT_ID": str(trial.experiment.id),
            "DET_TRIAL_SEED": str(trial.seed),
            "DET_TRIAL_RUN_ID": str(trial.run_id),
            "DET_STEPS_COMPLETED": str(latest.steps if latest else 0),
            "DET_HPARAMS": json.dumps(trial.hparams),
            "DET_EXPERIMENT_CONFIG": json.dumps(config),
            **({"DET_LATEST_CHECKPOINT": checkpoint} if checkpoint else {}),
            **dict(variable.split("=", 1) for variable in stated),
        }

    def _attend(self, container: subprocess.Popen[str], trial: Trial, allocation: Allocation) -> None:
        def read(output: Iterable[str]) -> None:
            for line in output:
                self._master.said(trial, line.rstrip("\n"))

        reader = started(read, container.stdout)
        code = container.wait()
        end_all("DET_ALLOCATION_ID", allocation.id)  # a container ends with its first process
        reader.join(timeout=30)
        with contextlib.suppress(OSError):
            (self._roots / allocation.container).rmdir()
        self._master.exited(trial, allocation, code if code >= 0 else 128 - code)

    def kill(self, allocation: Allocation) -> None:
        """End every process of a container at once, as ``kill -9`` does."""
        started(end_all, "DET_ALLOCATION_ID", allocation.id)

    def close(self) -> None:
        """Wait for the containers that are ending; nothing may be left of them."""
        for thread in self._threads:
            thread.join(timeout=30)
        left = marked(self._master.cluster_id, "DET_CLUSTER_ID")
        assert not left, f"left running: {left}"


def started(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def end_all(name: str, value: str) -> None:
    """Kill the processes that have this in their environment, and those that they start meanwhile."""
    deadline = time.monotonic() + 20
    while (found := marked(value, name)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@functools.cache
def way_to_isolate() -> list[str]:
    """The words that give a command a mount namespace of its own; an OSError where there is none."""
    reasons = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as storage:
            command = [*way, "bash", str(CONTAINER), "--probe", root, storage, *SEEN]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return way
        reasons.append(done.stderr)
    raise OSError("no private mount can be had: " + "; ".join(reasons))
