"""A Determined master in memory: creates experiments, runs their trials, and decides what becomes of them.

What it does when a trial's container ends follows determined v0.38.1, ``master/internal/{experiment,trial}.go``
and ``master/internal/task/allocation.go``, and in two things what they do, not what their comments say: a trial that
the searcher stops changes its state and gets no signal, and the searcher does not learn that a trial has ended for
``InvalidHP``. What it answers is held to a real master by ``test_recorded.py``.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.cluster.client_api import ClientApi
from tests.cluster.configs import as_go
from tests.cluster.log_policies import policies_met
from tests.cluster.searchers import Reason, Searcher, Wanted
from tests.cluster.server import Refused, Server
from tests.cluster.state import (
    STOPPING,
    TERMINAL,
    Allocation,
    Checkpoint,
    Experiment,
    Json,
    Report,
    Trial,
    now,
)
from tests.cluster.trial_api import TrialApi
from tests.cluster.unmanaged_api import UnmanagedApi
from tests.harness.machines import Machine

if TYPE_CHECKING:
    from tests.cluster.agent import Agent

MANY_SLOTS = 64  # of a master without an agent, whose trials run as far as it knows


class Master:
    """The master, at a port of loopback.

    Args:
        storage: ``checkpoint_storage`` of the cluster.
        machine: Where it runs, as far as the network can tell; None: here.
    """

    def __init__(
        self,
        *,
        storage: dict[str, Json],
        machine: Machine | None = None,
    ) -> None:
        self.storage = storage
        self.cluster_id = str(uuid.uuid4())
        self.started_at = now()
        self.changed = threading.Condition(threading.RLock())
        self.experiments: dict[int, Experiment] = {}
        self.trials: dict[int, Trial] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        self.tokens: dict[str, str] = {}  # of users, token -> name
        self._searches: dict[int, Searcher] = {}
        self.agent: Agent | None = None
        apis = [ClientApi(self), TrialApi(self), UnmanagedApi(self)]
        self.server = Server(apis, self.who, machine)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the master's state; whoever waits for a change is told at the end."""
        with self.changed:
            try:
                yield
            finally:
                self.changed.notify_all()

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a change of state. Returns whether it came in time."""
        with self.changed:
            return self.changed.wait_for(until, timeout_s)

    # --- Who and what -----------------------------------------------------------------------------------

    def who(self, token: str) -> tuple[str | None, str | None] | None:
        """(user, None) or (None, allocation) of a token; None where it is not good, or not any more."""
        if token in self.tokens:
            return self.tokens[token], None
        for trial in list(self.trials.values()):
            running = trial.running
            if running is not None and running.token == token:
                return None, running.id
        return None

    def experiment(self, experiment_id: int) -> Experiment:
        """An experiment, or 404."""
        if experiment_id not in self.experiments:
            raise Refused(404, f"experiment '{experiment_id}' not found")
        return self.experiments[experiment_id]

    def trial(self, trial_id: int) -> Trial:
        """A trial, or 404."""
        if trial_id not in self.trials:
            raise Refused(404, f"trial '{trial_id}' not found")
        return self.trials[trial_id]

    def allocation(self, allocation_id: str) -> tuple[Trial, Allocation]:
        """A run of a trial, or 404."""
        for trial in self.trials.values():
            for allocation in trial.allocations:
                if allocation.id == allocation_id:
                    return trial, allocation
        raise Refused(404, f"allocation '{allocation_id}' not found")

    def trials_of(self, experiment: Experiment) -> list[Trial]:
        """In the order of creation."""
        return [trial for trial in self.trials.values() if trial.experiment_id == experiment.id]

    def latest_checkpoint(self, trial: Trial) -> Checkpoint | None:
        """That of the most steps."""
        of_trial = [c for c in self.checkpoints.values() if c.trial_id == trial.id and c.state == "COMPLETED"]
        return max(of_trial, key=lambda checkpoint: checkpoint.steps, default=None)

    def best_validation(self, experiment: Experiment) -> float | None:
        """The best value of the searcher's metric that any trial of an experiment has reported."""
        name = experiment.searcher["metric"]
        reports = [r for trial in self.trials_of(experiment) for r in trial.of_group("validation")]
        values = [float(report.metrics[name]) for report in reports if name in report.metrics]
        better = min if experiment.searcher.get("smaller_is_better", True) else max
        return better(values, default=None)

    # --- Experiments ------------------------------------------------------------------------------------

    def add(self, experiment: Experiment) -> None:
        """Begin an experiment."""
        self.experiments[experiment.id] = experiment
        search = Searcher(experiment.config)
        self._searches[experiment.id] = search
        self._act(experiment, search.start())
        self.schedule()

    def _act(self, experiment: Experiment, actions: Sequence[Wanted | int]) -> None:
        """Do as the searcher says."""
        if experiment.state in TERMINAL or experiment.state in STOPPING:
            return
        for action in actions:
            if isinstance(action, Wanted):
                self._create_trial(experiment, action)
            else:
                trial = self.trials[action]
                trial.stopped_by_searcher = True
                self._stop(trial, "STOPPING_COMPLETED")

    def _create_trial(self, experiment: Experiment, wanted: Wanted) -> None:
        trial = Trial(
            id=len(self.trials) + 1,
            experiment_id=experiment.id,
            hparams=as_go(wanted.hparams),
            seed=wanted.seed,
            task_id=f"{experiment.id}.{uuid.UUID(int=random.getrandbits(128))}",
            state=experiment.state,
            warm_start=self._warm_start(experiment),
        )
        self.trials[trial.id] = trial
        self._searches[experiment.id].created(trial.id)

    def _warm_start(self, experiment: Experiment) -> str | None:
        source = experiment.searcher.get("source_checkpoint_uuid")
        if source is None and (trial_id := experiment.searcher.get("source_trial_id")) is not None:
            latest = self.latest_checkpoint(self.trial(int(trial_id)))
            source = latest.uuid if latest else None
        return source

    def set_state(self, experiment: Experiment, state: str) -> None:
        """Bring an experiment and its trials to a state: ``ACTIVE``, ``PAUSED`` or one of stopping."""
        if experiment.state in TERMINAL:
            raise Refused(400, f"experiment in terminal state {experiment.state}")
        if experiment.state in STOPPING and state not in ("STOPPING_KILLED", "STOPPING_ERROR"):
            return
        experiment.state = state
        for trial in self.trials_of(experiment):
            if trial.state in TERMINAL:
                continue
            if state in STOPPING:
                self._stop(trial, state)
            elif trial.state not in STOPPING:
                trial.state = state
                if state == "PAUSED":
                    self._preempt(trial)
        self._end_if_done(experiment)
        self.schedule()

    def revive(self, experiment: Experiment) -> None:
        """Go on with an experiment that has ended: with those of its trials that did not come to their end."""
        experiment.state, experiment.end_time = "ACTIVE", None
        is_single = experiment.searcher["name"] == "single"
        for trial in self.trials_of(experiment):
            if is_single or trial.state != "COMPLETED":
                trial.state, trial.end_time, trial.restarts = "ACTIVE", None, 0
                trial.closed = trial.invalid_hp = trial.stopped_by_searcher = False
                number = trial.task_id.count("-r") + 1
                trial.dont_retry = False  # which is remembered of a task
                trial.task_id = f"{trial.task_id.split('-r')[0]}-r{number}"
        self.schedule()

    def _end_if_done(self, experiment: Experiment) -> None:
        trials = self.trials_of(experiment)
        if experiment.state in TERMINAL or not all(trial.closed for trial in trials):
            return
        if experiment.state not in STOPPING:
            failed = experiment.failures >= len(trials)
            experiment.state = "STOPPING_ERROR" if failed else "STOPPING_COMPLETED"
        experiment.state = STOPPING[experiment.state]
        experiment.end_time = now()

    # --- Trials -----------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start every trial that there are slots for, the oldest first."""
        most = self.agent.slots if self.agent else MANY_SLOTS
        used = sum(running.slots for trial in self.trials.values() if (running := trial.running) is not None)
        for trial in list(self.trials.values()):
            experiment = self.experiments[trial.experiment_id]
            slots = experiment.slots_per_trial
            if trial.state != "ACTIVE" or experiment.state != "ACTIVE" or trial.running is not None:
                continue
            if used + slots > most:
                return
            used += slots
            trial.run_id += 1
            allocation = Allocation(
                id=f"{trial.task_id}.{trial.run_id}", token=f"task-{uuid.uuid4()}", slots=slots
            )
            trial.allocations.append(allocation)
            if self.agent is not None:
                self.agent.start(experiment, trial, allocation)

    def _preempt(self, trial: Trial) -> None:
        """Ask a trial's processes to stop; before they have met there is nothing to ask."""
        running = trial.running
        if running is None:
            return
        if running.ready:
            running.preempted = True
        else:
            self._kill(running)

    def _kill(self, allocation: Allocation) -> None:
        allocation.killed = True
        if self.agent is not None:
            self.agent.kill(allocation)

    def _stop(self, trial: Trial, state: str) -> None:
        if trial.state in TERMINAL:
            return
        trial.state = state
        if trial.running is None:
            self._close(trial, STOPPING[state])
        elif state in ("STOPPING_KILLED", "STOPPING_ERROR"):
            self._kill(trial.running)
        elif state == "STOPPING_CANCELED":
            self._preempt(trial)

    def exited(self, allocation: Allocation, exit_code: int) -> None:
        """A trial's container has ended: that was its end, or it is started again, or later."""
        with self.lock():
            trial, _ = self.allocation(allocation.id)
            allocation.end_time, allocation.exit_code = now(), exit_code
            failed = exit_code != 0 and not allocation.killed and not allocation.acked
            self.log(trial, f"Trial {trial.id} was terminated: exit code {exit_code}")
            if trial.state in STOPPING:
                self._close(trial, "ERROR" if failed else STOPPING[trial.state])
            elif failed and trial.dont_retry:
                self.log(trial, "trial failed and matched logs to a don't retry policy")
                self._close(trial, "ERROR")
            elif failed:
                trial.restarts += 1
                most = int(self.experiments[trial.experiment_id].config["max_restarts"])
                self.log(trial, f"trial failed (restart {trial.restarts}/{most})")
                if trial.restarts > most:
                    self._close(trial, "ERROR")
            elif trial.invalid_hp or not (allocation.acked or allocation.killed):
                self._close(trial, "COMPLETED")
            self.schedule()

    def _close(self, trial: Trial, state: str) -> None:
        """A trial has come to its end."""
        trial.state, trial.end_time, trial.closed = state, now(), True
        experiment = self.experiments[trial.experiment_id]
        reasons: dict[str, Reason] = {"ERROR": "ERRORED", "CANCELED": "CANCELED"}
        experiment.failures += state == "ERROR"
        self._act(experiment, self._searches[experiment.id].exited(trial.id, reasons.get(state)))
        self._end_if_done(experiment)

    # --- What trials say --------------------------------------------------------------------------------

    def log(self, trial: Trial, line: str) -> None:
        """A line of a trial's log."""
        with self.lock():
            trial.logs.append((now(), line))

    def said(self, trial: Trial, line: str) -> None:
        """A line that a trial's task wrote: its log policies are looked at."""
        with self.lock():
            self.log(trial, line)
            for policy in policies_met(self.experiments[trial.experiment_id].config, line):
                trial.dont_retry |= policy.get("action") == "cancel_retries"

    def report(self, trial: Trial, new: Report) -> None:
        """Take in metrics; validations are shown to the searcher first, whatever becomes of them."""
        experiment = self.experiments[trial.experiment_id]
        if new.group == "validation" and experiment.id in self._searches:
            self._act(experiment, self._searches[experiment.id].validated(trial.id, new.metrics))
            self.schedule()
        if new.run_id != trial.run_id:
            raise Refused(400, f"invalid run id, {new.run_id} (reported) != {trial.run_id} (expected)")
        if trial.state in TERMINAL:
            raise Refused(400, f"trial {trial.id} has ended")
        for old in trial.reports:
            overtaken = old.steps >= new.steps if old.group == new.group else old.steps > new.steps
            if old.run_id < new.run_id and overtaken:
                old.archived = True
        for old in trial.of_group(new.group):
            if old.steps == new.steps:
                return self._merge(old, new)
        trial.reports.append(new)
        return None

    def _merge(self, old: Report, new: Report) -> None:
        """A key that is there already is refused, be its value the same or not."""
        for key in new.metrics:
            if key in old.metrics:
                message = f"overwriting existing metric keys is not supported, conflicting key: {key}"
                raise Refused(500, message)
        old.metrics.update(new.metrics)

    def close(self) -> None:
        """End every container, then stop answering."""
        with self.lock():
            for trial in self.trials.values():
                trial.state = trial.state if trial.state in TERMINAL else "STOPPING_KILLED"
                if trial.running is not None:
                    self._kill(trial.running)
        self.wait(lambda: all(trial.running is None for trial in self.trials.values()), timeout_s=30)
        time.sleep(0.05)
        self.server.close()
