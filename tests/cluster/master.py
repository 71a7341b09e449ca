"""A Determined master in memory: creates experiments, runs their trials, and decides what becomes of them.

What it does when a trial's container ends follows determined v0.38.1, ``master/internal/{experiment,trial}.go`` and
``master/internal/task/allocation.go``; what it answers (``api.py``) is held to a real master by ``test_recorded.py``.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import requests
import yaml

from tests.cluster.api import USERNAME, answer, as_go
from tests.cluster.http import Json, Refused, Server
from tests.cluster.state import STOPPING, TERMINAL, Allocation, Experiment, Report, Trial, now, taken_apart
from tests.package import SearchMethod

if TYPE_CHECKING:
    from tests.cluster.agent import Agent

MANY_SLOTS = 64  # of a master without an agent, whose trials run as far as it knows


class Known(dict[int, Any]):
    """What the master has of a kind, by its id; another id is a 404."""

    def __missing__(self, number: int) -> Any:
        raise Refused(404, f"'{number}' not found")


class Master:
    """The master, with its ``checkpoint_storage``, at a port of loopback."""

    def __init__(self, *, storage: dict[str, Any]) -> None:
        self.storage = storage
        self.cluster_id = str(uuid.uuid4())
        self.changed = threading.Condition(threading.RLock())
        self.experiments: dict[int, Experiment] = Known()
        self.trials: dict[int, Trial] = Known()
        self.unmanaged: dict[str, Any] = {}  # experiments and trials, by their external ids
        self.tokens: dict[str, str] = {}  # of users, token -> name
        self.agent: Agent | None = None
        self.server = Server(self.who, lambda call: answer(self, call))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the master's state; whoever waits for a change is notified at the end."""
        with self.changed:
            try:
                yield
            finally:
                self.changed.notify_all()

    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a change of state, letting others hold it. Returns whether it came in time."""
        with self.changed:
            return self.changed.wait_for(until, timeout_s)

    def who(self, token: str) -> tuple[str | None, str | None]:
        """(user, None) or (None, allocation) of a token; (None, None) where it is not good, or not any more."""
        running = (trial.running for trial in list(self.trials.values()))
        return self.tokens.get(token), next((run.id for run in running if run and run.token == token), None)

    def allocation(self, name: str) -> tuple[Trial, Allocation]:
        """A run of a trial, or 404."""
        for trial in self.trials.values():
            for run in trial.allocations:
                if run.id == name:
                    return trial, run
        raise Refused(404, f"'{name}' not found")

    def trial_with(self, has: Callable[[Trial], bool]) -> Trial:
        """The trial of a task or a checkpoint, or 404."""
        for trial in self.trials.values():
            if has(trial):
                return trial
        raise Refused(404, "not found")

    # --- Experiments ------------------------------------------------------------------------------------

    def add(self, experiment: Experiment) -> None:
        """Begin an experiment, with the searches of ``det-ds search``; ``test_recorded.py`` judges them."""
        config = experiment.config
        self.experiments[experiment.id] = experiment
        seed = config["reproducibility"]["experiment_seed"]
        experiment.search = SearchMethod(config["searcher"], config.get("hyperparameters") or {}, seed)
        self._act(experiment, experiment.search.start())
        self.schedule()

    def _act(self, experiment: Experiment, actions: list[tuple[Any, ...]]) -> None:
        """Do as the searcher says, which counts its trials from 1.

        A trial that it stops changes its state and gets no signal, as on a real master.
        """
        if experiment.state in TERMINAL or experiment.state in STOPPING:
            return
        for kind, *rest in actions:
            if kind == "create":
                self._create_trial(experiment, *rest)
            else:
                self._stop(experiment.trials[rest[0] - 1], "STOPPING_COMPLETED")

    def _create_trial(self, experiment: Experiment, hparams: Any, seed: int) -> None:
        source = experiment.config["searcher"].get("source_checkpoint_uuid")
        if (number := experiment.config["searcher"].get("source_trial_id")) is not None:
            latest = self.trials[int(number)].latest
            source = source or (latest and latest.uuid)
        trial = Trial(
            id=len(self.trials) + 1,
            experiment=experiment,
            hparams=as_go(hparams),
            seed=seed,
            task_id=f"{experiment.id}.{uuid.uuid4()}",
            state=experiment.state,
            warm_start=source or "",
        )
        self.trials[trial.id] = trial
        experiment.trials.append(trial)

    def set_state(self, experiment: Experiment, state: str) -> None:
        """Bring an experiment and its trials to a state: ``ACTIVE``, ``PAUSED`` or one of stopping."""
        if experiment.state in TERMINAL:
            raise Refused(400, f"experiment in terminal state {experiment.state}")
        if experiment.state in STOPPING and state != "STOPPING_KILLED":
            return
        experiment.state = state
        for trial in experiment.trials:
            if state in STOPPING:
                self._stop(trial, state)
            elif trial.state not in TERMINAL and trial.state not in STOPPING:
                trial.state = state
                if state == "PAUSED":
                    self._preempt(trial)
        self._end_if_done(experiment)
        self.schedule()

    def revive(self, experiment: Experiment) -> None:
        """Go on with an experiment of one trial that has ended."""
        experiment.state = "ACTIVE"
        [trial] = experiment.trials
        trial.state, trial.end_time, trial.restarts = "ACTIVE", None, 0
        trial.invalid_hp = trial.dont_retry = False
        trial.hparams = experiment.config["hyperparameters"]
        first, *more = trial.task_id.split("-r")
        trial.task_id = f"{first}-r{len(more) + 1}"
        self.schedule()

    def _end_if_done(self, experiment: Experiment) -> None:
        if experiment.state not in TERMINAL and all(trial.end_time for trial in experiment.trials):
            failed = all(trial.state == "ERROR" for trial in experiment.trials)
            experiment.state = STOPPING.get(experiment.state, "ERROR" if failed else "COMPLETED")

    # --- Trials -----------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Start every trial that there are slots for, the oldest first."""
        free = self.agent.slots if self.agent else MANY_SLOTS
        free -= sum(run.slots for trial in self.trials.values() if (run := trial.running))
        for trial in list(self.trials.values()):
            if trial.state != "ACTIVE" or trial.experiment.state != "ACTIVE" or trial.running:
                continue
            slots = int(trial.experiment.config["resources"]["slots_per_trial"])
            if (free := free - slots) < 0:
                return
            trial.run_id += 1
            name, token = f"{trial.task_id}.{trial.run_id}", f"task-{uuid.uuid4()}"
            trial.allocations.append(Allocation(id=name, token=token, slots=slots))
            if self.agent is not None:
                self.agent.start(trial, trial.allocations[-1])

    def _preempt(self, trial: Trial) -> None:
        """Ask a trial's processes to stop; before they have met there is nothing to ask."""
        if (running := trial.running) and running.ready:
            running.preempted = True
        elif running:
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
        elif state == "STOPPING_KILLED":
            self._kill(trial.running)
        elif state == "STOPPING_CANCELED":
            self._preempt(trial)

    def exited(self, trial: Trial, allocation: Allocation, exit_code: int) -> None:
        """A trial's container has ended: that was its end, or it is started again, or later."""
        with self.lock():
            allocation.end_time, allocation.exit_code = now(), exit_code
            failed = exit_code != 0 and not allocation.killed and not allocation.acked
            self.log(trial, f"Trial {trial.id} was terminated: exit code {exit_code}")
            if trial.state in STOPPING:
                self._close(trial, "ERROR" if failed else STOPPING[trial.state])
            elif failed:
                trial.restarts += not trial.dont_retry
                most = int(trial.experiment.config["max_restarts"])
                self.log(trial, f"trial failed (restart {trial.restarts}/{most})")
                if trial.restarts > most or trial.dont_retry:
                    self._close(trial, "ERROR")
            elif trial.invalid_hp or not (allocation.acked or allocation.killed):
                self._close(trial, "COMPLETED")
            self.schedule()

    def _close(self, trial: Trial, state: str) -> None:
        """A trial has come to its end; of ``InvalidHP`` its searcher does not learn, as on a real master."""
        trial.state, trial.end_time, experiment = state, now(), trial.experiment
        if experiment.search is not None:
            reason = {"ERROR": "ERRORED", "CANCELED": "CANCELED"}.get(state)
            self._act(experiment, experiment.search.exited(experiment.trials.index(trial) + 1, reason))
        self._end_if_done(experiment)

    # --- What trials say --------------------------------------------------------------------------------

    def log(self, trial: Trial, line: str) -> None:
        """A line of a trial's log."""
        with self.lock():
            trial.logs.append((now(), line))

    def said(self, trial: Trial, line: str) -> None:
        """A line that a trial's task wrote: log policies are looked at, but for the line of the configuration.

        Source: determined 0.38.1's ``master/internal/logpattern/logpattern.go``.
        """
        self.log(trial, line)
        text = taken_apart(line)[2]
        for policy in trial.experiment.config["log_policies"]:
            is_met = policy.get("pattern") and re.search(policy["pattern"], text)
            if is_met and '"log_policies":' not in text:
                trial.dont_retry |= policy.get("action") == "cancel_retries"

    def report(self, trial: Trial, new: Report) -> None:
        """Take in metrics; validations are shown to the searcher first, whatever becomes of them."""
        experiment = trial.experiment
        if new.group == "validation" and experiment.search is not None:
            number = experiment.trials.index(trial) + 1
            self._act(experiment, experiment.search.validated(number, new.metrics))
            self.schedule()
        if new.run_id != trial.run_id:
            raise Refused(400, f"invalid run id, {new.run_id} (reported) != {trial.run_id} (expected)")
        if trial.state in TERMINAL:
            raise Refused(400, f"trial {trial.id} has ended")
        named = ("training", "validation")  # groups with a table of their own; all others share one
        for old in trial.reports:
            same = old.group == new.group or not {old.group, new.group} & {*named}
            overtaken = old.steps >= new.steps if same else old.steps > new.steps
            old.archived |= old.run_id < new.run_id and overtaken
        for old in trial.of_group(new.group):
            if old.steps == new.steps:  # a key that is there already is refused, be its value the same or not
                for key in new.metrics.keys() & old.metrics.keys():
                    message = f"overwriting existing metric keys is not supported, conflicting key: {key}"
                    raise Refused(500, message)
                old.metrics.update(new.metrics)
                return
        trial.reports.append(new)

    def close(self) -> None:
        """End every container, then stop answering."""
        with self.lock():
            for trial in self.trials.values():
                trial.state = trial.state if trial.state in TERMINAL else "STOPPING_KILLED"
                if trial.running is not None:
                    self._kill(trial.running)
        if self.agent is not None:
            self.wait(lambda: all(trial.running is None for trial in self.trials.values()), timeout_s=30)
            time.sleep(0.05)
        self.server.close()


# --- A master without an agent: its trials run, as far as it knows, and what they ask is asked by a test ---


@contextmanager
def still_master() -> Iterator[Master]:
    """A master without an agent, with a user who is logged in."""
    master = Master(storage={"type": "shared_fs", "host_path": "/storage"})
    master.tokens["a user's"] = USERNAME
    try:
        yield master
        assert not master.server.errors
    finally:
        master.close()


def ask(
    master: Master, method: str, path: str, body: Json = None, *, token: str = "a user's"
) -> requests.Response:
    """Ask it, as the user or by another token."""
    headers = {"Authorization": f"Bearer {token}"}
    return requests.request(method, master.server.url + path, json=body, headers=headers, timeout=120)


def create(master: Master, config: Json) -> Experiment:
    """Create an experiment, all of whose first trials are started at once."""
    answer = ask(master, "POST", "/api/v1/experiments", {"config": yaml.safe_dump(config), "activate": True})
    assert answer.status_code == 200, answer.text
    return master.experiments[answer.json()["experiment"]["id"]]
