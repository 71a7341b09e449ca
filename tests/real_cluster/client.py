"""A client of a real Determined master: the real ``det``, and the answers of the master's API.

It needs an address and a user. What it creates it deletes: :meth:`RealCluster.delete_all`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined.common.experimental.trial import LogLevel
from determined.experimental import Determined

from tests.cluster.cluster import DET, alike
from tests.command import ROOT

# No test takes as long: a guard against hangs, not a measure. Others may use the cluster too.
TIMEOUT_S = 1800.0
ENDED = ("STATE_COMPLETED", "STATE_ERROR", "STATE_CANCELED", "STATE_DELETED")

Json = dict[str, Any]
Metrics = list[tuple[int, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One start of a trial.

    Args:
        started: When its containers started, as the master writes times; empty if they never did.
        ended: When it ended, likewise.
    """

    started: str
    ended: str


class RealCluster:
    """A master at an address.

    Args:
        address: As in ``DET_MASTER``. The user is ``DET_USER`` with ``DET_PASS``, or whom ``det`` takes otherwise.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._determined = Determined(
            master=address, user=os.environ.get("DET_USER"), password=os.environ.get("DET_PASS")
        )
        self._created: list[int] = []
        self._models: list[str] = []

    # --- The command line -------------------------------------------------------------------------------

    def det(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``det`` in the repository's root, to its end."""
        done = subprocess.run(
            [str(DET), *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "DET_MASTER": self._address},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if check:
            said = re.sub(r"Preparing files to send[^\n\r]*\s*", "", done.stdout + done.stderr)
            assert done.returncode == 0, f"det {' '.join(map(str, arguments))}:\n{said}"
        return done

    def create(
        self, config: str | Path, *overrides: str, context: str | Path = ".", include: Path | None = None
    ) -> int:
        """``det experiment create CONFIG CONTEXT --config ...``.

        Args:
            config: Path of the YAML.
            overrides: ``KEY=VALUE``, one each.
            context: The context directory.
            include: A file that joins the context directory.

        Returns:
            The experiment's id.
        """
        words: list[str | Path] = [word for override in overrides for word in ("--config", override)]
        words += ["--include", include] if include else []
        done = self.det("experiment", "create", config, context, *words)
        match = re.search(r"Created experiment (\d+)", done.stdout)
        assert match, done.stdout
        self._created.append(int(match[1]))
        return self._created[-1]

    def continue_(self, experiment_id: int, *overrides: str) -> None:
        """``det experiment continue ID --config ...``, until the master has taken it up."""
        words = [word for override in overrides for word in ("--config", override)]
        self.det("experiment", "continue", str(experiment_id), *words)
        self.poll(lambda: self.experiment(experiment_id)["state"] not in ENDED)

    def pause(self, experiment_id: int) -> None:
        """``det experiment pause ID``, until its only trial's containers have ended."""
        self.det("experiment", "pause", str(experiment_id))
        self.poll(lambda: self.trial(experiment_id)["state"] == "STATE_PAUSED")
        self.poll(lambda: all(start.ended for start in self.allocations(self.trial(experiment_id))))

    def register(self, name: str, uuid: str) -> Json:
        """``det model create NAME`` and ``det model register-version NAME UUID``. Returns the version."""
        self.det("model", "create", name)
        self._models.append(name)
        self.det("model", "register-version", name, uuid)
        [version] = self.get(f"/api/v1/models/{name}/versions")["modelVersions"]
        return dict(version)

    def delete_all(self) -> None:
        """Delete what was created here, whatever state it is in; name on stderr what could not be deleted."""
        for name in self._models:
            self._try("model", "delete", name)
        for number in self._created:
            if self.experiment(number)["state"] not in ENDED:
                self._try("experiment", "kill", str(number))
        for number in self._created:
            self.poll(lambda number=number: self.experiment(number)["state"] in ENDED)  # type: ignore[misc]
            self._try("experiment", "delete", "--yes", str(number))

    def _try(self, *arguments: str) -> None:
        if (done := self.det(*arguments, check=False)).returncode:
            print(f"det {' '.join(arguments)}: {done.stdout}{done.stderr}", file=sys.stderr)

    # --- What is there ----------------------------------------------------------------------------------

    def get(self, path: str, **parameters: Any) -> Json:
        """The master's answer to a GET."""
        return dict(self._determined._session.get(path, params=parameters).json())

    def slots(self) -> list[Json]:
        """Every slot that may be used: its ``agent``, and its ``type`` (``TYPE_CPU`` and so on)."""
        return [
            {"agent": agent["id"], "type": slot["device"]["type"]}
            for agent in self.get("/api/v1/agents")["agents"]
            for slot in agent["slots"].values()
            if slot["enabled"] and not slot["draining"]
        ]

    def experiment(self, experiment_id: int) -> Json:
        """As the master describes it."""
        return dict(self.get(f"/api/v1/experiments/{experiment_id}")["experiment"])

    def trials(self, experiment_id: int) -> list[Json]:
        """Its trials, in the order of creation."""
        found = self.get(f"/api/v1/experiments/{experiment_id}/trials", limit=1000)["trials"]
        return sorted(found, key=lambda trial: int(trial["id"]))

    def trial(self, experiment_id: int) -> Json:
        """Its only trial, which a master makes a moment after the experiment."""
        self.poll(lambda: bool(self.trials(experiment_id)))
        [trial] = self.trials(experiment_id)
        return trial

    def allocations(self, trial: Json) -> list[Allocation]:
        """Every start of a trial, in order."""
        found = [
            a for task in trial["taskIds"] for a in self.get(f"/api/v1/tasks/{task}")["task"]["allocations"]
        ]
        starts = [Allocation(started=a.get("startTime") or "", ended=a.get("endTime") or "") for a in found]
        return sorted(starts, key=lambda allocation: allocation.started)

    def metrics(self, trial: Json) -> dict[str, Metrics]:
        """Group -> (steps, metrics) of the reports that count, but what differs from run to run."""
        return {
            group: [
                (report.steps_completed, alike(report.metrics))
                for report in self._determined.get_trial(trial["id"]).iter_metrics(group)
            ]
            for group in ("training", "validation")
        }

    def checkpoints(self, trial: Json) -> list[Json]:
        """Those that are there, in the order of training; ``metadata.steps_completed`` says how far."""
        found = self.get(f"/api/v1/trials/{trial['id']}/checkpoints")["checkpoints"]
        there = [checkpoint for checkpoint in found if checkpoint["state"] == "STATE_COMPLETED"]
        return sorted(there, key=lambda checkpoint: int(checkpoint["metadata"]["steps_completed"]))

    def log(self, trial: Json) -> str:
        """A trial's whole log."""
        return "".join(self._determined.get_trial(trial["id"]).iter_logs(follow=False))

    def errors(self, trial: Json) -> list[str]:
        """The lines of a trial's log that the web UI shows under its filter "Error"."""
        lines = self._determined.get_trial(trial["id"]).iter_logs(min_level=LogLevel.ERROR)
        return [line.rstrip() for line in lines]

    # --- Waiting ----------------------------------------------------------------------------------------

    def poll(self, until: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert time.monotonic() < deadline, f"not in {TIMEOUT_S:g} s"
            time.sleep(0.5)

    def wait(self, experiment_id: int, state: str = "STATE_COMPLETED") -> list[Json]:
        """Wait until an experiment ends; that it ends in another state is an error. Returns its trials."""
        self.poll(lambda: self.experiment(experiment_id)["state"] in ENDED)
        found, trials = self.experiment(experiment_id)["state"], self.trials(experiment_id)
        assert found == state, f"experiment {experiment_id}: {found}\n{self.log(trials[-1])[-6000:]}"
        return trials

    def wait_for_report(self, trial: Json, steps: int) -> None:
        """Wait until a trial has reported so many steps of training."""
        self.poll(lambda: any(done >= steps for done, _ in self.metrics(trial)["training"]))
