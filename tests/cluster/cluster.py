"""A cluster on this machine, with a master and an agent of ours, used by the real ``det`` as a person uses one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster.agent import Agent
from tests.cluster.http import Call, Fault
from tests.cluster.master import Master
from tests.cluster.state import TERMINAL, Experiment, Trial
from tests.harness.command import ROOT, run_forked
from tests.harness.machines import Machine
from tests.package import records

Metrics = list[tuple[int, dict[str, Any]]]  # steps completed, name -> value
# What differs from one run to the next however alike they are: clocks and memory.
UNLIKE = ("samples_per_second", "tokens_per_second", "bubble", "peak_memory_gib", "peak_memory_gib_min")
TIMEOUT_S = 900.0  # no test takes as long: a guard against hangs, not a measure
SIGNALLED_S = 1.0


def reports_of(trial: Trial, group: str) -> Metrics:
    """The reports of a group that count, in the order of training."""
    return [(report.steps, report.metrics) for report in trial.of_group(group)]


def metrics_of(of: Trial | Path) -> dict[str, Metrics]:
    """The training and the validation of a trial or of a run directory, but what differs from run to run."""
    groups = {
        group: records(of, group) if isinstance(of, Path) else reports_of(of, group)
        for group in ("training", "validation")
    }
    return {
        group: [(steps, {k: v for k, v in found.items() if k not in UNLIKE}) for steps, found in reports]
        for group, reports in groups.items()
    }


class Cluster:
    """Two slots, on one machine or one on each of some. It injects faults, too.

    ``folder`` is an empty one that all machines see, and every container has more of an ``environment``.
    """

    def __init__(
        self, folder: Path, *, environment: dict[str, str] | None = None, machines: Sequence[Machine] = ()
    ) -> None:
        self.storage, self._home = folder / "storage", folder / "home"
        self._home.mkdir(parents=True)
        shared = {"type": "shared_fs", "host_path": str(self.storage)}
        self.master = Master(storage=shared, machine=machines[0] if machines else None)
        self.agent = self.master.agent = Agent(self.master, folder, environment or {}, machines)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.master.close()
        self.agent.close()

    def det(self, *arguments: str | Path | int) -> str:
        """Run ``det`` in the repository's root, which has to succeed. Returns what it printed."""
        unset = ("XDG_CONFIG_HOME", "DET_USER", "DET_PASS", "DET_USER_TOKEN", "DET_MASTER_CERT_FILE")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment["HOME"] = str(self._home)
        words = ["--master", self.master.server.here, *map(str, arguments)]
        done = run_forked("tests.harness.forked:det", words, env=environment)
        said = re.sub(r"Preparing files to send[^\n\r]*\s*", "", done.stdout + done.stderr)
        assert done.returncode == 0, f"det {' '.join(words)}:\n{said}"
        return str(done.stdout)

    def create(
        self, config: str | Path, *overrides: str, include: Path | None = None, paused: bool = False
    ) -> Experiment:
        """``det experiment create`` of the repository, and a file beside it."""
        words: list[str | Path] = [word for override in overrides for word in ("--config", override)]
        words += ["--include", include] if include else []
        words += ["--paused"] if paused else []
        said = self.det("experiment", "create", config, ROOT, *words)
        match = re.search(r"Created experiment (\d+)", said)
        assert match, said
        return self.master.experiments[int(match[1])]

    def activate(self, experiment: Experiment) -> None:
        """``det experiment activate``."""
        self.det("experiment", "activate", experiment.id)

    @contextmanager
    def reached(self, batch: int, *experiments: Experiment) -> Iterator[None]:
        """Activate experiments that are paused, each of one trial, and wait until these have reported a batch.

        Within the block they are held at their next checkpoint.
        """
        trials = [trial for experiment in experiments for trial in experiment.trials]
        for trial in trials:
            trial.gate = batch
        try:
            for experiment in experiments:
                if experiment.state == "PAUSED":
                    self.activate(experiment)
            for trial in trials:
                self.poll(lambda trial=trial: trial.closed or trial.batches >= batch)  # type: ignore[misc]
                assert trial.batches >= batch, f"it ended first:\n{trial.log[-6000:]}"
            yield
            time.sleep(SIGNALLED_S)  # the trial's own poll hears of a pause before it goes on
        finally:
            with self.master.lock():
                for trial in trials:
                    trial.gate = None

    def stop(self, experiment: Experiment, *, at: int, how: str = "pause") -> int:
        """``det experiment pause`` or ``cancel`` after that batch; returns the batch of the last checkpoint."""
        with self.reached(at, experiment):
            self.det("experiment", how, experiment.id)
        [trial], state = experiment.trials, {"pause": "PAUSED", "cancel": "CANCELED"}[how]
        self.poll(lambda: trial.running is None and trial.state in (state, *TERMINAL))
        assert trial.state == state, trial.log[-6000:]
        assert trial.latest
        return trial.latest.steps

    def poll(self, until: Callable[[], bool]) -> None:
        """Wait for something to become true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert time.monotonic() < deadline, f"not in {TIMEOUT_S:g} s"
            time.sleep(0.1)

    def wait(self, experiment: Experiment, state: str = "COMPLETED") -> list[Trial]:
        """Wait until an experiment ends, in this state and no other. Returns its trials."""
        self.poll(lambda: experiment.state in TERMINAL)
        found, trials = experiment.state, experiment.trials
        assert found == state, f"experiment {experiment.id}: {found}\n{trials[-1].log[-6000:]}"
        return trials

    def inject(self, kind: str, method: str, path: str, *, trial: Trial | None = None, **how: Any) -> Fault:
        """Have the next call of a kind meet a fault, of one trial or of all; see :class:`Fault`."""
        task = trial.task_id if trial else ""
        return self.master.server.inject(Fault(kind=kind, method=method, path=path, task=task, **how))  # type: ignore[arg-type]

    def calls(self, path: str, *, allocation: str) -> list[Call]:
        """The calls of an allocation; ``path`` is a regular expression that the whole path matches."""
        calls = self.master.server.calls
        return [call for call in calls if re.fullmatch(path, call.path) and call.allocation == allocation]
