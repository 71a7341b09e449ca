"""The clusters of the scenarios: a real one, and one on this machine with a master and an agent of ours.

Both are used alike, by the real ``det`` and by Determined's own client.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from determined.common.api import authentication, bindings, logs
from determined.common.api.bindings import trialv1Trial as Trial
from determined.experimental import Determined
from determined.experimental import Trial as DeterminedTrial

from tests.cluster.agent import Agent
from tests.cluster.api import USERNAME
from tests.cluster.http import Call, Fault
from tests.cluster.master import Master
from tests.cluster.state import Trial as Kept
from tests.harness.command import ROOT, run_forked
from tests.package import records

Metrics = list[tuple[int, dict[str, Any]]]  # steps completed, name -> value
ENDED = ("COMPLETED", "ERROR", "CANCELED", "DELETED")
# What differs from one run to the next however alike they are: clocks and memory.
UNLIKE = ("samples_per_second", "tokens_per_second", "bubble", "peak_memory_gib", "peak_memory_gib_min")
GROUPS = ("training", "validation")
SIGNALLED_S = 1.0


class Checkpoint(NamedTuple):
    """A complete checkpoint: the batch it was written at, its uuid, and the names of its files."""

    batch: int
    uuid: str
    files: tuple[str, ...]


def _alike(reports: Metrics) -> Metrics:
    """Reports less what differs from run to run."""
    return [
        (steps, {name: value for name, value in found.items() if name not in UNLIKE})
        for steps, found in reports
    ]


def metrics_of(run_dir: Path) -> dict[str, Metrics]:
    """What :meth:`Cluster.metrics` says of a trial, of a run directory."""
    return {group: _alike(list(records(run_dir, group))) for group in GROUPS}


class Cluster:
    """A cluster with two CPU slots or more. What is created there is deleted by :meth:`delete_all`.

    Args:
        address: As in ``DET_MASTER``. The user is ``DET_USER`` with ``DET_PASS``, or whom ``det`` takes otherwise.
    """

    timeout_s = 1800.0  # no test takes as long: a guard against hangs, not a measure
    every_s = 0.5  # how often the master is asked for what is waited for; others may use it, too

    def __init__(self, address: str) -> None:
        login = {"user": os.environ.get("DET_USER"), "password": os.environ.get("DET_PASS")}
        self._session = Determined(master=address, **login)._session
        self._address, self._environment = address, dict(os.environ)
        self._created: list[int] = []

    def det(self, *arguments: str | Path | int, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run ``det`` in the repository's root; with ``check`` it has to succeed."""
        words = ["--master", self._address, *map(str, arguments)]
        done = run_forked("tests.harness.forked:det", words, env=self._environment)
        assert done.returncode == 0 or not check, f"det {' '.join(words)}:\n{done.stdout}{done.stderr}"
        return done

    def create(
        self, config: str | Path, *overrides: str, include: Path | None = None, paused: bool = False
    ) -> int:
        """``det experiment create`` of the repository, and a file beside it; the number of the experiment."""
        words: list[str | Path] = [word for override in overrides for word in ("--config", override)]
        words += ["--include", include] if include else []
        words += ["--paused"] if paused else []
        done = self.det("experiment", "create", config, ROOT, *words)
        match = re.search(r"Created experiment (\d+)", done.stdout)
        assert match, done.stdout
        self._created.append(int(match[1]))
        return self._created[-1]

    @contextmanager
    def reached(self, batch: int, number: int) -> Iterator[None]:
        """Activate an experiment that is paused, and wait until its trial has reported a batch.

        Within the block it is still training: ours holds it, a real one needs a training that is long enough.
        """
        if self.state(number) == "PAUSED":
            self.activate(number)

        def has_reported() -> bool:
            trial = self.trial(number)
            is_closed = trial.state.name in ENDED
            has = any(steps >= batch for steps, _ in self.reports(trial, "training"))
            assert has or not is_closed, f"it ended first:\n{self.log(trial)[-6000:]}"
            return has

        self.poll(has_reported)
        yield

    def activate(self, number: int) -> None:
        self.det("experiment", "activate", number)

    def stop(self, number: int, *, at: int, how: str = "pause") -> int:
        """``det experiment pause`` or ``cancel`` after that batch; returns the batch of the last checkpoint."""
        with self.reached(at, number):
            self.det("experiment", how, number)
        state = {"pause": "PAUSED", "cancel": "CANCELED"}[how]
        self.poll(lambda: self.trial(number).state.name in (state, *ENDED))
        trial = self.trial(number)
        assert trial.state.name == state, self.log(trial)[-6000:]
        self.poll(lambda: all(start.endTime for start in self.starts(trial)))
        return self.checkpoints(trial)[-1].batch

    def continue_(self, number: int, *overrides: str) -> None:
        """``det experiment continue ID --config OVERRIDE ...``, until the master has taken it up."""
        words = [word for override in overrides for word in ("--config", override)]
        self.det("experiment", "continue", number, *words)
        self.poll(lambda: self.state(number) not in ENDED)

    def delete_all(self) -> None:
        """Delete what was created here, whatever state it is in; name on stderr what could not be deleted."""
        for number in self._created:
            self.det("experiment", "kill", number, check=False)
            self.poll(lambda number=number: self.state(number) in ENDED)  # type: ignore[misc]
            done = self.det("experiment", "delete", "--yes", number, check=False)
            if done.returncode:
                print(f"experiment {number} is left: {done.stdout}{done.stderr}", file=sys.stderr)

    # --- What is there ----------------------------------------------------------------------------------

    def slots(self, kind: str = "") -> list[str]:
        """The agent of each slot that may be used, of all kinds or of one (``TYPE_CPU``, ...)."""
        return [
            agent["id"]
            for agent in self._session.get("/api/v1/agents").json()["agents"]
            for slot in agent["slots"].values()
            if slot["enabled"] and not slot["draining"] and kind in ("", slot["device"]["type"])
        ]

    def experiment(self, number: int) -> bindings.v1Experiment:
        return bindings.get_GetExperiment(self._session, experimentId=number).experiment

    def state(self, number: int) -> str:
        return self.experiment(number).state.name

    def trials(self, number: int) -> list[Trial]:
        found = bindings.get_GetExperimentTrials(self._session, experimentId=number, limit=1000).trials
        return sorted(found, key=lambda trial: trial.id)

    def trial(self, number: int) -> Trial:
        """The only trial of an experiment."""
        self.poll(lambda: bool(self.trials(number)))  # a master makes it a moment after the experiment
        [trial] = self.trials(number)
        return trial

    def starts(self, trial: Trial) -> list[bindings.v1Allocation]:
        """The allocations of a trial whose containers were started."""
        tasks = [bindings.get_GetTask(self._session, taskId=task).task for task in trial.taskIds or ()]
        return [start for task in tasks for start in task.allocations if start.startTime]

    def reports(self, trial: Trial, group: str) -> Metrics:
        """The reports of a group that count, in the order of training."""
        found = DeterminedTrial(trial.id, self._session).iter_metrics(group)
        return [(report.steps_completed, report.metrics) for report in found]

    def metrics(self, trial: Trial) -> dict[str, Metrics]:
        """Group -> reports, but what differs from run to run."""
        return {group: _alike(self.reports(trial, group)) for group in GROUPS}

    def checkpoints(self, trial: Trial) -> list[Checkpoint]:
        """Those that are there, in the order of training."""
        found = bindings.get_GetTrialCheckpoints(self._session, id=trial.id).checkpoints
        return sorted(
            Checkpoint(
                int(one.metadata["steps_completed"]),
                one.uuid,
                tuple(name for name in one.resources if not name.endswith("/")),
            )
            for one in found
            if one.state.name == "COMPLETED"
        )

    def log(self, trial: Trial, level: bindings.v1LogLevel | None = None) -> str:
        """The log of a trial; with a level what the web UI shows under its filter."""
        return "".join(line.message for line in logs.trial_logs(self._session, trial.id, min_level=level))

    def poll(self, until: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + self.timeout_s
        while not until():
            assert time.monotonic() < deadline, f"not in {self.timeout_s:g} s"
            time.sleep(self.every_s)

    def wait(self, number: int, state: str = "COMPLETED") -> list[Trial]:
        """Wait until an experiment ends, in this state and no other. Returns its trials."""
        self.poll(lambda: self.state(number) in ENDED)
        found, trials = self.state(number), self.trials(number)
        assert found == state, f"experiment {number}: {found}\n{self.log(trials[-1])[-6000:]}"
        return trials


class FakeCluster(Cluster):
    """A master of ours with an agent of two slots, in an empty folder. It injects faults, too."""

    timeout_s, every_s = 900.0, 0.1

    def __init__(self, folder: Path) -> None:
        self.storage, home, roots = folder / "storage", folder / "home", folder / "roots"
        for made in (self.storage, home, roots):
            made.mkdir(parents=True)
        self.master = Master(storage={"type": "shared_fs", "host_path": str(self.storage)})
        self.master.agent = Agent(self.master, slots=2, storage=self.storage, roots=roots)
        self._address, self._created = self.master.server.url, []
        self._session = authentication.login(self._address, USERNAME, "")
        unset = ("XDG_CONFIG_HOME", "DET_USER", "DET_PASS", "DET_USER_TOKEN", "DET_MASTER_CERT_FILE")
        self._environment = {name: value for name, value in os.environ.items() if name not in unset}
        self._environment["HOME"] = str(home)

    def close(self) -> None:
        self.master.close()
        assert self.master.agent is not None
        self.master.agent.close()
        assert not self.master.server.errors, self.master.server.errors

    @contextmanager
    def reached(self, batch: int, number: int) -> Iterator[None]:
        trial = self.kept(self.trial(number))
        trial.gate = batch
        try:
            with super().reached(batch, number):
                yield
            time.sleep(SIGNALLED_S)  # the trial's own poll hears of a pause before it goes on
        finally:
            with self.master.lock():
                trial.gate = None

    def slots(self, kind: str = "") -> list[str]:
        return ["agent-1"] * 2

    def kept(self, trial: Trial) -> Kept:
        """All that the master keeps of a trial."""
        return self.master.trials[trial.id]

    def inject(self, kind: str, method: str, path: str, **how: Any) -> Fault:
        """Have the next call of a kind meet a fault; see :class:`Fault`."""
        self.master.server.faults.append(Fault(kind=kind, method=method, path=path, **how))  # type: ignore[arg-type]
        return self.master.server.faults[-1]

    def calls(self, path: str, *, allocation: str) -> list[Call]:
        """The calls of an allocation; ``path`` is a regular expression that the whole path matches."""
        calls = self.master.server.calls
        return [call for call in calls if re.fullmatch(path, call.path) and call.allocation == allocation]
