"""A cluster by the API of its master: what is alike of ours and of a real one, and the real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined.common import api
from determined.common.api import bindings, logs
from determined.experimental import Determined
from determined.experimental import Trial as DeterminedTrial

from tests.harness.command import ROOT
from tests.package import records

Json = dict[str, Any]
Metrics = list[tuple[int, dict[str, Any]]]  # steps completed, name -> value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial as the master described it last."""

    id: int
    state: str  # by the names of the API, less their ``STATE_``
    restarts: int  # after failures; being paused does not count
    hparams: Json
    batches: int  # so many it has reported
    best: dict[str, Any]  # the metrics of its best validation, if any
    tasks: tuple[str, ...]  # of which ``det experiment continue`` begins another


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that the master lists as complete, the batch it was written at, and the names of its files."""

    uuid: str
    batch: int
    files: tuple[str, ...]


DET = Path(sys.executable).with_name("det")
ENDED = ("COMPLETED", "ERROR", "CANCELED", "DELETED")
# What differs from one run to the next however alike they are: clocks and memory.
UNLIKE = (
    "samples_per_second",
    "tokens_per_second",
    "bubble",
    "peak_memory_gib",
    "peak_memory_gib_min",
)


def alike(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics less what differs from run to run."""
    return {name: value for name, value in metrics.items() if name not in UNLIKE}


def metrics_of(run_dir: Path) -> dict[str, Metrics]:
    """What :meth:`Cluster.metrics` says of a trial, of a run directory."""
    groups = ("training", "validation")
    return {group: [(steps, alike(found)) for steps, found in records(run_dir, group)] for group in groups}


class Cluster(ABC):
    """A cluster with two CPU slots or more, asked by the real ``det`` and by the API of its master.

    Args:
        session: With the master.
        timeout_s: No test takes as long: a guard against hangs, not a measure.
        every_s: How often the master is asked for what is waited for.
    """

    def __init__(self, session: api.Session, *, timeout_s: float, every_s: float) -> None:
        self._session, self._timeout_s, self._every_s = session, timeout_s, every_s

    # --- The command line -------------------------------------------------------------------------------

    @abstractmethod
    def run_det(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run ``det`` to its end."""

    @abstractmethod
    def reached(self, batch: int, *experiment_ids: int) -> AbstractContextManager[None]:
        """Activate experiments that are paused, each of one trial, and wait until these have reported a batch.

        Within the block they are still training: ours holds them, a real one needs a training that is long enough.
        """

    @abstractmethod
    def slots(self, kind: str = "") -> list[str]:
        """The agent of each slot that may be used, of all kinds or of one (``TYPE_CPU``, ...)."""

    def det(self, *arguments: str | Path | int, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``det`` in the repository's root, to its end; with ``check`` it has to succeed."""
        words = [str(argument) for argument in arguments]
        done = self.run_det(words)
        if check:
            said = re.sub(r"Preparing files to send[^\n\r]*\s*", "", done.stdout + done.stderr)
            assert done.returncode == 0, f"det {' '.join(words)}:\n{said}"
        return done

    def create(
        self,
        config: str | Path,
        *overrides: str,
        context: Path = ROOT,
        include: Path | None = None,
        paused: bool = False,
    ) -> int:
        words: list[str | Path] = [word for override in overrides for word in ("--config", override)]
        words += ["--include", include] if include else []
        words += ["--paused"] if paused else []
        done = self.det("experiment", "create", config, context, *words)
        match = re.search(r"Created experiment (\d+)", done.stdout)
        assert match, done.stdout
        return int(match[1])

    def activate(self, experiment_id: int) -> None:
        """``det experiment activate``."""
        self.det("experiment", "activate", experiment_id)

    def stop(self, experiment_id: int, *, at: int, how: str = "pause") -> int:
        """``det experiment pause`` or ``cancel`` after that batch; returns the batch of the last checkpoint."""
        with self.reached(at, experiment_id):
            self.det("experiment", how, experiment_id)
        state = {"pause": "PAUSED", "cancel": "CANCELED"}[how]
        self.poll(lambda: self.trial(experiment_id).state in (state, *ENDED))
        trial = self.trial(experiment_id)
        assert trial.state == state, self.log(trial)[-6000:]
        self.poll(lambda: all(start.get("endTime") for start in self.starts(trial)))
        return self.checkpoints(trial)[-1].batch

    def continue_(self, experiment_id: int, *overrides: str) -> None:
        """``det experiment continue ID --config OVERRIDE ...``, until the master has taken it up."""
        words = [word for override in overrides for word in ("--config", override)]
        self.det("experiment", "continue", experiment_id, *words)
        self.poll(lambda: self._state(experiment_id) not in ENDED)

    # --- What is there ----------------------------------------------------------------------------------

    def get(self, path: str, **parameters: Any) -> Json:
        """The master's answer to a GET."""
        return dict(self._session.get(path, params=parameters).json())

    def experiment(self, experiment_id: int) -> Json:
        return dict(self.get(f"/api/v1/experiments/{experiment_id}")["experiment"])

    def _state(self, experiment_id: int) -> str:
        return str(self.experiment(experiment_id)["state"]).removeprefix("STATE_")

    def trials(self, experiment_id: int) -> list[Trial]:
        found = self.get(f"/api/v1/experiments/{experiment_id}/trials", limit=1000)["trials"]
        return [_trial(one) for one in sorted(found, key=lambda one: int(one["id"]))]

    def trial(self, experiment_id: int) -> Trial:
        """Its only trial."""
        self.poll(lambda: bool(self.trials(experiment_id)))  # a master makes it a moment after the experiment
        [trial] = self.trials(experiment_id)
        return trial

    def num_starts(self, trial: Trial) -> int:
        """How often the containers of a trial were started."""
        return len([start for start in self.starts(trial) if start.get("startTime")])

    def starts(self, trial: Trial) -> list[Json]:
        """The allocations of a trial."""
        return [
            each for task in trial.tasks for each in self.get(f"/api/v1/tasks/{task}")["task"]["allocations"]
        ]

    def reports(self, trial: Trial, group: str) -> Metrics:
        """The reports of a group that count, in the order of training."""
        found = DeterminedTrial(trial.id, self._session).iter_metrics(group)
        return [(report.steps_completed, report.metrics) for report in found]

    def metrics(self, trial: Trial) -> dict[str, Metrics]:
        """Group (``training``, ``validation``) -> reports, but what differs from run to run."""
        return {
            group: [(steps, alike(metrics)) for steps, metrics in self.reports(trial, group)]
            for group in ("training", "validation")
        }

    def checkpoints(self, trial: Trial) -> list[Checkpoint]:
        """Those that are there, in the order of training."""
        found = self.get(f"/api/v1/trials/{trial.id}/checkpoints")["checkpoints"]
        there = [
            Checkpoint(
                uuid=one["uuid"],
                batch=int(one["metadata"]["steps_completed"]),
                files=tuple(name for name in one["resources"] if not name.endswith("/")),
            )
            for one in found
            if one["state"] == "STATE_COMPLETED"
        ]
        return sorted(there, key=lambda checkpoint: checkpoint.batch)

    def log(self, trial: Trial) -> str:
        return "".join(line.message for line in logs.trial_logs(self._session, trial.id))

    def errors(self, trial: Trial) -> list[str]:
        """The lines of a trial's log that the web UI shows under its filter "Error"."""
        lines = logs.trial_logs(self._session, trial.id, min_level=bindings.v1LogLevel.ERROR)
        return [line.message.rstrip() for line in lines]

    # --- Waiting ----------------------------------------------------------------------------------------

    def poll(self, until: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + self._timeout_s
        while not until():
            assert time.monotonic() < deadline, f"not in {self._timeout_s:g} s"
            time.sleep(self._every_s)

    def wait(self, experiment_id: int, state: str = "COMPLETED") -> list[Trial]:
        """Wait until an experiment ends, in this state and no other. Returns its trials."""
        self.poll(lambda: self._state(experiment_id) in ENDED)
        found, trials = self._state(experiment_id), self.trials(experiment_id)
        assert found == state, f"experiment {experiment_id}: {found}\n{self.log(trials[-1])[-6000:]}"
        return trials

    def wait_for_report(self, trial: Trial, batch: int) -> None:
        """Wait until a trial has reported so many batches; that it ends before is an error."""

        def is_there() -> bool:
            is_closed = _trial(self.get(f"/api/v1/trials/{trial.id}")["trial"]).state in ENDED
            is_reached = any(steps >= batch for steps, _ in self.reports(trial, "training"))
            assert is_reached or not is_closed, f"it ended first:\n{self.log(trial)[-6000:]}"
            return is_reached

        self.poll(is_there)


def _trial(one: Json) -> Trial:
    best = (one.get("bestValidation") or {}).get("metrics") or {}
    return Trial(
        id=int(one["id"]),
        state=one["state"].removeprefix("STATE_"),
        restarts=one["restarts"],
        hparams=one["hparams"],
        batches=one["totalBatchesProcessed"],
        best=best.get("avgMetrics") or {},
        tasks=tuple(one["taskIds"]),
    )


class RealCluster(Cluster):
    """A real master. What is created there is deleted by :meth:`delete_all`.

    Args:
        address: As in ``DET_MASTER``. The user is ``DET_USER`` with ``DET_PASS``, or whom ``det`` takes otherwise.
    """

    def __init__(self, address: str) -> None:
        login = {"user": os.environ.get("DET_USER"), "password": os.environ.get("DET_PASS")}
        session = Determined(master=address, **login)._session
        super().__init__(session, timeout_s=1800.0, every_s=0.5)  # others may use it, too
        self._address = address
        self._created: list[int] = []

    def run_det(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(DET), *words],
            cwd=ROOT,
            env={**os.environ, "DET_MASTER": self._address},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self._timeout_s,
        )

    def create(self, *arguments: Any, **options: Any) -> int:
        self._created.append(super().create(*arguments, **options))
        return self._created[-1]

    @contextmanager
    def reached(self, batch: int, *experiment_ids: int) -> Iterator[None]:
        for number in experiment_ids:
            if self._state(number) == "PAUSED":
                self.activate(number)
        for number in experiment_ids:
            self.wait_for_report(self.trial(number), batch)
        yield

    def slots(self, kind: str = "") -> list[str]:
        """The agent of each slot that may be used, of all kinds or of one (``TYPE_CPU``, ...)."""
        return [
            agent["id"]
            for agent in self.get("/api/v1/agents")["agents"]
            for slot in agent["slots"].values()
            if slot["enabled"] and not slot["draining"] and kind in ("", slot["device"]["type"])
        ]

    def delete_all(self) -> None:
        """Delete what was created here, whatever state it is in; name on stderr what could not be deleted."""
        for number in self._created:
            if self._state(number) not in ENDED:
                self._try("experiment", "kill", number)
        for number in self._created:
            self.poll(lambda number=number: self._state(number) in ENDED)  # type: ignore[misc]
            self._try("experiment", "delete", "--yes", number)

    def _try(self, *arguments: str | int) -> None:
        if (done := self.det(*arguments, check=False)).returncode:
            print(f"det {' '.join(map(str, arguments))}: {done.stdout}{done.stderr}", file=sys.stderr)
