"""A cluster on this machine: Determined's unmodified client and harness, and a master and an agent of ours.

::

    with Cluster(tmp_path) as cluster:
        cluster.det("experiment", "create", "experiments/gpt2/const.yaml", ".", "-f")
        assert cluster.experiment(1).state == "COMPLETED"
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.cluster import configs
from tests.cluster.agent import Agent, end_all
from tests.cluster.master import Master
from tests.cluster.server import Fault, FaultKind
from tests.cluster.state import TERMINAL, Allocation, Call, Checkpoint, Experiment, Report, Trial
from tests.command import ROOT, run_forked
from tests.machines import Machine

DET = Path(sys.executable).with_name("det")
# No test takes as long: a guard against hangs, not a measure.
TIMEOUT_S = 900.0
DET_TIMEOUT_S = 60.0

# What differs from one run to the next however alike they are: clocks and memory.
UNLIKE = (
    "samples_per_second",
    "tokens_per_second",
    "bubble",
    "peak_memory_gib",
    "peak_memory_gib_min",
    "memory_allocated_gb",
    "memory_reserved_gb",
)


class Cluster:
    """A master with one agent, or with one on each machine.

    Args:
        folder: An empty folder, for its storage and the client's home.
        slots: CPU slots of the agent.
        environment: More environment variables for every container.
        signals_stops: See :class:`Master`.
        machines: Its agents', which share the slots; none: one agent, here. The master is on the first of them, and
            the folder is one that all of them see.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 2,
        environment: dict[str, str] | None = None,
        signals_stops: bool = False,
        machines: Sequence[Machine] = (),
    ) -> None:
        self.storage = folder / "storage"
        self._home = folder / "home"
        roots = folder / "roots"
        for made in (self.storage, self._home, roots):
            made.mkdir(parents=True)
        storage = {"type": "shared_fs", "host_path": str(self.storage)}
        self._enter = machines[0].enter if machines else []
        self.master = Master(
            storage=storage,
            check=configs.check,
            signals_stops=signals_stops,
            machine=machines[0] if machines else None,
        )
        self.agent = Agent(
            self.master,
            slots=slots,
            storage=self.storage,
            roots=roots,
            environment=environment or {},
            machines=machines,
        )
        self.master.agent = self.agent

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.master.close()
        self.agent.close()

    # --- The command line -------------------------------------------------------------------------------

    def det(
        self, *arguments: str | Path, cwd: Path = ROOT, timeout_s: float = DET_TIMEOUT_S, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run ``det`` to its end.

        Args:
            arguments: Of the command.
            cwd: Where it is started.
            timeout_s: How long it may take.
            check: Whether it has to succeed.
        """
        unset = ("XDG_CONFIG_HOME", "DET_USER", "DET_PASS", "DET_USER_TOKEN", "DET_MASTER_CERT_FILE")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment.update(DET_MASTER=self.master.server.url, HOME=str(self._home))
        words = [str(argument) for argument in arguments]
        if self._enter:
            done = subprocess.run(
                [*self._enter, f"--wd={cwd}", "--", str(DET), *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        else:
            words = ["--master", self.master.server.url, *words]  # its default is read when it is loaded
            done = run_forked("tests.forked:det", words, env=environment, cwd=cwd, timeout_s=timeout_s)
        if check:
            assert done.returncode == 0, f"det {' '.join(map(str, arguments))}:\n{done.stdout}{done.stderr}"
        return done

    def create(self, config: str | Path, *overrides: str, context: Path = ROOT, paused: bool = False) -> int:
        """``det experiment create CONFIG CONTEXT --config ...``. Returns the experiment's id."""
        words = [word for override in overrides for word in ("--config", override)]
        words += ["--paused"] if paused else []
        done = self.det("experiment", "create", config, context, *words)
        match = re.search(r"Created experiment (\d+)", done.stdout)
        assert match, done.stdout
        return int(match[1])

    def pause(self, experiment_id: int, held: threading.Event) -> None:
        """``det experiment pause``, and wait until its trials have stopped.

        Args:
            experiment_id: Of the experiment.
            held: Of :meth:`hold_at_report`; set once the pause is asked for.
        """
        self.det("experiment", "pause", str(experiment_id))
        held.set()
        self.wait_for(lambda: not any(trial.running for trial in self.trials(experiment_id)))

    def activate(self, experiment_id: int) -> None:
        """``det experiment activate``."""
        self.det("experiment", "activate", str(experiment_id))

    # --- What is there ----------------------------------------------------------------------------------

    def experiment(self, experiment_id: int) -> Experiment:
        """An experiment."""
        return self.master.experiments[experiment_id]

    def trials(self, experiment_id: int) -> list[Trial]:
        """Its trials, in the order of creation."""
        return self.master.trials_of(self.experiment(experiment_id))

    def trial(self, experiment_id: int) -> Trial:
        """Its only trial."""
        [trial] = self.trials(experiment_id)
        return trial

    def metrics(self, trial: Trial, group: str) -> list[tuple[int, dict[str, Any]]]:
        """(steps, metrics) of the reports that count, but what differs from run to run."""
        return [(report.steps, alike(report.metrics)) for report in trial.of_group(group)]

    def checkpoints(self, trial: Trial) -> list[Checkpoint]:
        """Those that are there, in the order of training."""
        found = [c for c in self.master.checkpoints.values() if c.trial_id == trial.id]
        return sorted((c for c in found if c.state == "COMPLETED"), key=lambda checkpoint: checkpoint.steps)

    def calls(self, method: str | None, path: str, *, allocation: str | None = None) -> list[Call]:
        """The calls of a kind; ``path`` is a regular expression that the whole path matches; None: any method."""
        return [
            call
            for call in self.master.server.calls
            if method in (None, call.method)
            and re.fullmatch(path, call.path)
            and (allocation is None or call.allocation == allocation)
        ]

    def log(self, trial: Trial) -> str:
        """A trial's log so far."""
        return "\n".join(line for _, line in trial.logs)

    # --- Waiting, and faults ----------------------------------------------------------------------------

    def wait_for(self, until: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Wait for something to become true of the cluster."""
        if not self.master.wait(until, timeout_s):
            logs = [f"trial {t.id} ({t.state}):\n{self.log(t)[-4000:]}" for t in self.master.trials.values()]
            raise AssertionError(f"not in {timeout_s:g} s\n" + "\n".join(logs[-2:]))

    def poll(self, until: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Wait for something to become true that the master does not know of."""
        deadline = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < deadline, f"not in {timeout_s:g} s"
            time.sleep(0.3)

    def wait(self, experiment_id: int, state: str = "COMPLETED", timeout_s: float = TIMEOUT_S) -> Experiment:
        """Wait until an experiment is in a state; that it ends in another is an error."""
        experiment = self.experiment(experiment_id)
        self.wait_for(lambda: experiment.state == state or experiment.state in TERMINAL, timeout_s)
        logs = "\n".join(self.log(trial)[-6000:] for trial in self.trials(experiment_id))
        assert experiment.state == state, f"{experiment.state}\n{logs}"
        return experiment

    def wait_for_report(self, trial: Trial, group: str, steps: int) -> Report:
        """Wait until a trial has reported so many steps."""
        self.wait_for(lambda: any(r.steps >= steps for r in trial.of_group(group)) or trial.closed)
        found = [report for report in trial.of_group(group) if report.steps >= steps]
        assert found, f"it ended first:\n{self.log(trial)[-6000:]}"
        return found[0]

    def inject(
        self,
        kind: FaultKind,
        method: str,
        path: str,
        *,
        seconds: float = 0.0,
        trial: Trial | None = None,
    ) -> Fault:
        """Have the next call of a kind meet a fault, of one trial or of all; see :class:`Fault`."""
        task = trial.task_id if trial else None
        fault = Fault(kind=kind, method=method, path=path, seconds=seconds, task=task)
        return self.master.server.inject(fault)

    def hold_at_report(self, trial: Trial, number: int) -> threading.Event:
        """Have a trial wait in its training report of this number, from 1, until the event is set.

        The report is accepted; it is the progress after it that hangs.
        """
        gate, path = threading.Event(), f"/api/v1/trials/{trial.id}/progress"
        self.master.server.inject(Fault(kind="hang", method="POST", path=path, skip=number - 1, gate=gate))
        return gate

    def kill_9(self, allocation: Allocation) -> None:
        """Kill every process of a trial's container; the master learns of it as of any failure."""
        end_all("DET_ALLOCATION_ID", allocation.id)


def alike(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics less what differs from run to run."""
    return {name: value for name, value in metrics.items() if name not in UNLIKE}
