"""A cluster on this machine: Determined's unmodified client and harness, and a master and an agent of ours."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from determined.common.api import authentication

from tests.cluster.agent import Agent
from tests.cluster.client import Cluster, Trial
from tests.cluster.master import Master
from tests.cluster.server import Fault, FaultKind
from tests.cluster.state import USERNAME, Call
from tests.cluster.state import Trial as Kept
from tests.harness.command import ROOT, run_forked
from tests.harness.machines import Machine


class FakeCluster(Cluster):
    """A master with one agent, or with one on each machine.

    Beyond what every cluster can do, it injects faults and shows what the master was asked.

    Args:
        folder: An empty folder, for its storage and the client's home.
        slots: CPU slots of the agent.
        environment: More environment variables for every container.
        machines: Its agents', which share the slots; none: one agent, here. The master is on the first of them, and
            the folder is one that all of them see.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 2,
        environment: dict[str, str] | None = None,
        machines: Sequence[Machine] = (),
    ) -> None:
        self.storage = folder / "storage"
        self._home = folder / "home"
        roots = folder / "roots"
        for made in (self.storage, self._home, roots):
            made.mkdir(parents=True)
        storage = {"type": "shared_fs", "host_path": str(self.storage)}
        self.master = Master(storage=storage, machine=machines[0] if machines else None)
        self.agent = Agent(
            self.master,
            slots=slots,
            storage=self.storage,
            roots=roots,
            environment=environment or {},
            machines=machines,
        )
        self.master.agent = self.agent
        session = authentication.login(self.master.server.here, USERNAME, "")
        super().__init__(session, timeout_s=900.0, every_s=0.1)

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.master.close()
        self.agent.close()

    def run_det(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        unset = ("XDG_CONFIG_HOME", "DET_USER", "DET_PASS", "DET_USER_TOKEN", "DET_MASTER_CERT_FILE")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment["HOME"] = str(self._home)
        words = ["--master", self.master.server.here, *words]
        return run_forked(
            "tests.harness.forked:det", words, env=environment, cwd=ROOT, timeout_s=self._timeout_s
        )

    @contextmanager
    def reached(self, batch: int, *experiment_ids: int) -> Iterator[None]:
        opened = threading.Event()
        trials = [self.trial(number) for number in experiment_ids]
        for trial in trials:
            self.kept(trial).gate = (batch, opened)
        try:
            for number in experiment_ids:
                if self.master.experiments[number].state == "PAUSED":
                    self.activate(number)
            for trial in trials:
                self.wait_for_report(trial, batch)
            yield
        finally:
            opened.set()
            for trial in trials:
                self.kept(trial).gate = None

    def slots(self, kind: str = "") -> list[str]:
        return ["agent-1"] * self.agent.slots

    # --- What only ours can do --------------------------------------------------------------------------

    def kept(self, trial: Trial) -> Kept:
        """All that the master keeps of a trial."""
        return self.master.trials[trial.id]

    def inject(
        self, kind: FaultKind, method: str, path: str, *, trial: Trial | None = None, **how: Any
    ) -> Fault:
        """Have the next call of a kind meet a fault, of one trial or of all; see :class:`Fault`."""
        task = self.kept(trial).task_id if trial else None
        return self.master.server.inject(Fault(kind=kind, method=method, path=path, task=task, **how))

    def calls(self, method: str | None, path: str, *, allocation: str) -> list[Call]:
        """The calls of an allocation; ``path`` is a regular expression that the whole path matches; None: any."""
        return [
            call
            for call in self.master.server.calls
            if method in (None, call.method)
            and re.fullmatch(path, call.path)
            and call.allocation == allocation
        ]
