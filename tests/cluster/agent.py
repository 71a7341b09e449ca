"""An agent: starts the containers of a trial, follows their output, and reports their end to the master.

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cluster.state import Allocation, Trial
from tests.harness.forked import marked
from tests.harness.machines import HIDDEN, PYTHON, Machine
from tests.harness.ranks import free_port

if TYPE_CHECKING:
    from tests.cluster.master import Master

CONTAINER = Path(__file__).with_name("container.sh")
BIN = Path(sys.executable).parent
SEEN = sorted(folder for folder in PYTHON if folder.startswith(HIDDEN))
# The namespaces of a container: with the right to mount, or with a user namespace that gives it.
WAYS = (["unshare", "-m"], ["unshare", "-U", "-r", "-m"])


class Agent:
    """Starts containers, on this machine or one on each of some, which share the slots; each slot is a rank.

    ``storage`` is the shared file system, ``roots`` an empty folder, and every container more of an ``environment``.
    """

    def __init__(
        self,
        master: Master,
        *,
        slots: int,
        storage: Path,
        roots: Path,
        environment: dict[str, str],
        machines: Sequence[Machine],
    ) -> None:
        self._master, self.slots, self._storage, self._roots = master, slots, storage, roots
        self._environment, self._machines = environment, machines
        self._threads: list[threading.Thread] = []

    def start(self, trial: Trial, allocation: Allocation) -> None:
        """Start a trial's containers; the master is told when they have ended."""
        if self._machines:
            allocation.addresses = tuple(machine.address for machine in self._machines)
        variables, containers = self._variables(trial, allocation), []
        for number, name in enumerate(allocation.resources):
            root = self._roots / name
            root.mkdir()
            enter = self._machines[number].enter if self._machines else []
            words = map(str, ("bash", CONTAINER, root, self._storage, BIN, *SEEN))
            own = {"DET_AGENT_ID": f"agent-{number + 1}", "DET_RESOURCES_ID": name, "DET_CONTAINER_ID": name}
            container = subprocess.Popen(
                [*enter, *way_to_isolate(), *words],
                env={**variables, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            containers.append(container)
        self._threads.append(started(self._attend, containers, trial, allocation))

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
            "DET_SLOT_IDS": json.dumps(list(range(allocation.slots // len(allocation.addresses)))),
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
            **self._environment,
        }

    def _attend(self, containers: list[subprocess.Popen[str]], trial: Trial, allocation: Allocation) -> None:
        def read(output: Iterable[str]) -> None:
            for line in output:
                self._master.said(trial, line.rstrip("\n"))

        readers = [started(read, each.stdout) for each in containers]
        while None in (codes := [each.poll() for each in containers]) and not any(codes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                containers[codes.index(None)].wait(0.2)
        code = next(filter(None, codes), 0)  # one that ends with an error ends the others
        end_all("DET_ALLOCATION_ID", allocation.id)  # a container ends with its first process
        for each, reader in zip(containers, readers, strict=True):
            each.wait()
            reader.join(timeout=30)
        for name in allocation.resources:
            with contextlib.suppress(OSError):
                (self._roots / name).rmdir()
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
