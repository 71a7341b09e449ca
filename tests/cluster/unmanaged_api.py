"""What ``determined.experimental.core_v2`` asks the master of a trial that runs elsewhere: its part of the REST API.

Source: ``master/internal/api_experiment.go`` and ``api_trials.go`` of determined v0.38.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.cluster import views
from tests.cluster.configs import parse
from tests.cluster.server import Refused, route
from tests.cluster.state import USERNAME, Call, Experiment, Trial

if TYPE_CHECKING:
    from tests.cluster.master import Master


class UnmanagedApi:
    """The calls of unmanaged experiments: the same external id is the same experiment, and the same trial."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._experiments: dict[str, int] = {}  # external id -> id
        self._trials: dict[str, int] = {}

    @route("PUT", "/api/v1/experiments/by-external-id/{external}")
    def put_experiment(self, request: Call, external: str) -> dict[str, Any]:
        if not request.body.get("unmanaged"):
            raise Refused(400, "only unmanaged experiments are supported")
        with self._master.lock():
            if external not in self._experiments:
                number = len(self._master.experiments) + 1
                config = parse(request.body["config"])
                config["resources"] = {}
                self._master.experiments[number] = Experiment(
                    id=number,
                    config=config,
                    original_config=request.body["config"],
                    context_tgz=b"",
                    state="ACTIVE",
                    username=USERNAME,
                    job_id=f"unmanaged-{number}",
                    name=config["name"],
                )
                self._experiments[external] = number
            experiment = self._master.experiments[self._experiments[external]]
            view = views.experiment_view(self._master, experiment)
            return {"experiment": view, "config": experiment.config}

    @route("PUT", "/api/v1/trials")
    def put_trial(self, request: Call) -> dict[str, Any]:
        external, asked = request.body["externalTrialId"], request.body["createTrialRequest"]
        with self._master.lock():
            if external not in self._trials:
                number = len(self._master.trials) + 1
                self._master.trials[number] = Trial(
                    id=number,
                    experiment_id=int(asked["experimentId"]),
                    hparams=asked["hparams"],
                    seed=0,
                    task_id=f"unmanaged-{number}",
                )
                self._trials[external] = number
            trial = self._master.trial(self._trials[external])
            return {"trial": {**views.trial_view(self._master, trial), "taskId": trial.task_id}}

    @route("POST", "/api/v1/trials/{trial_id}/start")
    def start(self, request: Call, trial_id: int) -> dict[str, Any]:
        with self._master.lock():
            trial = self._master.trial(trial_id)
            if trial.run_id and not request.body.get("resume"):
                raise Refused(400, "trial has been started already")
            trial.run_id += 1
            trial.state = "RUNNING"
            newest = self._master.latest_checkpoint(trial)
            answer: dict[str, Any] = {
                "trialRunId": trial.run_id,
                "stepsCompleted": newest.steps if newest else 0,
            }
            return {**answer, "latestCheckpoint": newest.uuid} if newest else answer

    @route("PATCH", "/api/v1/trials/{trial_id}")
    def patch(self, request: Call, trial_id: int) -> dict[str, Any]:
        """A heartbeat; with a state, its beginning or its end."""
        with self._master.lock():
            trial = self._master.trial(trial_id)
            state = request.body.get("state")
            if state is not None:
                trial.state = state.removeprefix("STATE_")
            return {"trial": views.trial_view(self._master, trial)}
