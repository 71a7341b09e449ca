"""An agent: starts the container of a trial, follows its output, tells the master of its end.

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
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from tests.cluster.state import Allocation, Experiment, Trial
from tests.cluster.trial_api import resources_id
from tests.harness import forked
from tests.harness.machines import Machine
from tests.harness.ranks import ROOT, free_port

if TYPE_CHECKING:
    from tests.cluster.master import Master

CONTAINER = Path(__file__).with_name("container.sh")
WORKER = Path(__file__).parents[1] / "harness" / "worker.py"
BIN = Path(sys.executable).parent
HIDDEN = ("/run/", "/tmp/")
# The namespaces of a container: with the right to mount, or with a user namespace that gives it.
WAYS = (["unshare", "-m"], ["unshare", "-U", "-r", "-m"])
# Ends what is left of a cluster when the test session is no more, however it ended: its input then ends.
GUARD = "import sys; from tests.cluster.agent import end_all; sys.stdin.read(); end_all(*sys.argv[1:])"


class Agent:
    """Starts containers on this machine.

    Args:
        master: Which is told of their ends.
        slots: CPU slots, a trial's ranks each taking one.
        storage: The shared file system.
        roots: An empty folder, for theirs.
        environment: More environment variables for every container.
        machines: A trial has a container on each of them, with its share of the slots; none: one, here.
    """

    def __init__(
        self,
        master: Master,
        *,
        slots: int,
        storage: Path,
        roots: Path,
        environment: dict[str, str],
        machines: Sequence[Machine] = (),
    ) -> None:
        way = way_to_isolate()
        assert isinstance(way, list), "is asked for by why_not() first"
        self._way = way
        self._master = master
        self.slots = slots
        self._storage = storage
        self._roots = roots
        self._environment = environment
        self._machines = machines
        self._threads: list[threading.Thread] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, "DET_CLUSTER_ID", master.cluster_id],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, experiment: Experiment, trial: Trial, allocation: Allocation) -> None:
        """Start a trial's containers; the master is told when they have ended."""
        allocation.port = free_port()
        if self._machines:
            allocation.addresses = tuple(machine.address for machine in self._machines)
        containers = [
            self._container(number, experiment, trial, allocation)
            for number in range(len(allocation.addresses))
        ]
        thread = threading.Thread(target=self._attend, args=(containers, trial, allocation), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _container(
        self, number: int, experiment: Experiment, trial: Trial, allocation: Allocation
    ) -> subprocess.Popen[str]:
        root = self._roots / f"{allocation.id}.{number}"
        root.mkdir()
        command = [*self._way, "bash", str(CONTAINER), str(root), str(self._storage), str(BIN), str(WORKER)]
        if self._machines:
            command = [*self._machines[number].enter, *command]
        return subprocess.Popen(
            [*command, *seen_all_the_same()],
            env=self._variables(number, experiment, trial, allocation),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _variables(
        self, number: int, experiment: Experiment, trial: Trial, allocation: Allocation
    ) -> dict[str, str]:
        latest = self._master.latest_checkpoint(trial)
        checkpoint = latest.uuid if latest else trial.warm_start
        variables = {
            "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/run/determined/home",
            "LANG": "C.UTF-8",
            "C10D_PORT": str(allocation.port),
            "PYTHONUSERBASE": "/run/determined/pythonuserbase",
            forked.ADDRESS: forked.address(),
            "DET_MASTER": self._master.server.url,
            "DET_CLUSTER_ID": self._master.cluster_id,
            "DET_AGENT_ID": f"agent-{number + 1}",
            "DET_SLOT_IDS": json.dumps(list(range(allocation.slots // len(allocation.addresses)))),
            "DET_TASK_ID": trial.task_id,
            "DET_TASK_TYPE": "TRIAL",
            "DET_ALLOCATION_ID": allocation.id,
            "DET_RESOURCES_ID": resources_id(allocation, number),
            "DET_RESOURCES_TYPE": "docker-container",
            "DET_CONTAINER_ID": resources_id(allocation, number),
            "DET_SESSION_TOKEN": allocation.token,
            "DET_USER_TOKEN": "",
            "DET_USER": experiment.username,
            "DET_USE_TLS": "false",
            "DET_SEGMENT_ENABLED": "false",
            "DET_WORKDIR": "/run/determined/workdir",
            "DET_RUN_DIR": "/run/determined",
            "DET_TRIAL_ID": str(trial.id),
            "DET_EXPERIMENT_ID": str(experiment.id),
            "DET_TRIAL_SEED": str(trial.seed),
            "DET_TRIAL_RUN_ID": str(trial.run_id),
            "DET_STEPS_COMPLETED": str(latest.steps if latest else 0),
            "DET_HPARAMS": json.dumps(trial.hparams),
            "DET_EXPERIMENT_CONFIG": json.dumps(experiment.config),
        }
        if checkpoint:
            variables["DET_LATEST_CHECKPOINT"] = checkpoint
        wanted = experiment.config["environment"]["environment_variables"]["cpu"]
        return {**variables, **dict(variable.split("=", 1) for variable in wanted), **self._environment}

    def _attend(self, containers: list[subprocess.Popen[str]], trial: Trial, allocation: Allocation) -> None:
        readers = [
            threading.Thread(target=self._read, args=(each.stdout, trial), daemon=True) for each in containers
        ]
        for reader in readers:
            reader.start()
        while None in (codes := [each.poll() for each in containers]) and not any(codes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                containers[codes.index(None)].wait(0.2)
        code = next(filter(None, codes), 0)  # one that ends with an error ends the others
        end_all("DET_ALLOCATION_ID", allocation.id)  # a container ends with its first process
        for each, reader in zip(containers, readers, strict=True):
            each.wait()
            reader.join(timeout=30)
        for number in range(len(containers)):
            with contextlib.suppress(OSError):
                (self._roots / f"{allocation.id}.{number}").rmdir()
        self._master.exited(allocation, code if code >= 0 else 128 - code)

    def _read(self, output: IO[str], trial: Trial) -> None:
        for line in output:
            self._master.said(trial, line.rstrip("\n"))

    def kill(self, allocation: Allocation) -> None:
        """End every process of a container at once, as ``kill -9`` does."""
        threading.Thread(target=end_all, args=("DET_ALLOCATION_ID", allocation.id), daemon=True).start()

    def close(self) -> None:
        """Wait for the containers that are ending; nothing may be left of them."""
        for thread in self._threads:
            thread.join(timeout=30)
        self._guard.communicate(timeout=60)
        left = marked("DET_CLUSTER_ID", self._master.cluster_id)
        assert not left, f"left running: {left}"


def marked(name: str, value: str) -> list[psutil.Process]:
    """The processes that live and have this in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_all(name: str, value: str) -> None:
    """Kill the processes that have this in their environment, and those that they start meanwhile."""
    deadline = time.monotonic() + 20
    while (found := marked(name, value)) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)


def seen_all_the_same() -> list[str]:
    """Folders that the Python which runs this needs, and that a container would hide."""
    folders = {os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), sys.prefix}
    return sorted(folder for folder in folders if folder.startswith(HIDDEN))


@functools.cache
def way_to_isolate() -> list[str] | str:
    """The command that gives a process a mount namespace of its own; else a sentence why there is none."""
    reasons = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            root, storage = Path(folder) / "root", Path(folder) / "storage"
            root.mkdir()
            storage.mkdir()
            command = [*way, "bash", str(CONTAINER), "--probe", str(root), str(storage), *seen_all_the_same()]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"no private mount can be had: {error}"
            if done.returncode == 0:
                return way
            reasons.append(f"{' '.join(way)}: {done.stderr.strip() or done.returncode}")
    return "no private mount can be had: " + "; ".join(reasons)


def why_not() -> str | None:
    """Why no container can be started here, or None."""
    way = way_to_isolate()
    return way if isinstance(way, str) else None
