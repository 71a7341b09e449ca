"""What the ``det`` command line asks the master: its part of the REST API."""

from __future__ import annotations

import base64
import io
import tarfile
import time
import uuid
from typing import TYPE_CHECKING, Any

from tests.cluster import views
from tests.cluster.configs import check, merge, parse
from tests.cluster.server import Refused, route
from tests.cluster.state import TERMINAL, USERNAME, VERSION, Call, Experiment, Json, Trial

if TYPE_CHECKING:
    from tests.cluster.master import Master

STATES = {
    "activate": "ACTIVE",
    "pause": "PAUSED",
    "cancel": "STOPPING_CANCELED",
    "kill": "STOPPING_KILLED",
}


class ClientApi:
    """The calls of Determined's client."""

    def __init__(self, master: Master) -> None:
        self._master = master

    # --- The master, users ------------------------------------------------------------------------------

    @route("GET", "/info", is_open=True)
    def info(self, request: Call) -> dict[str, Any]:
        ids = {"cluster_id": self._master.cluster_id, "master_id": self._master.cluster_id}
        return {**ids, "cluster_name": "test", "version": VERSION}

    @route("GET", "/api/v1/master", is_open=True)
    def master_info(self, request: Call) -> dict[str, Any]:
        return {
            "version": VERSION,
            "masterId": self._master.cluster_id,
            "clusterId": self._master.cluster_id,
            "clusterName": "test",
            **dict.fromkeys(("hasCustomLogo", "strictJobQueueControl", "rbacEnabled"), False),
        }

    @route("POST", "/api/v1/auth/login", is_open=True)
    def login(self, request: Call) -> dict[str, Any]:
        """The user ``determined`` is in, without a password."""
        if request.body["username"] != USERNAME or request.body.get("password"):
            raise Refused(401, "invalid credentials")
        token = f"user-{uuid.uuid4()}"
        self._master.tokens[token] = USERNAME
        return {"token": token, "user": self._user()}

    @route("GET", "/api/v1/me")
    def me(self, request: Call) -> dict[str, Any]:
        return {"user": self._user()}

    def _user(self) -> dict[str, Any]:
        at = dict.fromkeys(("modifiedAt", "lastAuthAt"), self._master.started_at)
        more = {"agentUserGroup": None, "displayName": "", "remote": False}
        return {"id": 2, "username": USERNAME, "admin": True, "active": True, **at, **more}

    # --- Experiments ------------------------------------------------------------------------------------

    @route("POST", "/api/v1/experiments")
    def create(self, request: Call) -> dict[str, Any]:
        body = request.body
        complete = self._judged(parse(body["config"]))
        files = body.get("modelDefinition") or []
        with self._master.lock():
            experiment = Experiment(
                id=len(self._master.experiments) + 1,
                config=complete,
                original_config=body["config"],
                context_tgz=pack(files),
                state="ACTIVE" if body.get("activate") else "PAUSED",
                username=request.user or "",
                job_id=str(uuid.uuid4()),
                name=complete["name"],
            )
            if not body.get("validateOnly"):
                self._master.add(experiment)
            return self._created(experiment)

    def _judged(self, config: Json) -> Json:
        found, complete = check(config, self._master.storage)
        if found:
            raise Refused(400, "invalid experiment configuration: " + "; ".join(found))
        agent = self._master.agent
        slots = complete["resources"]["slots_per_trial"]
        if agent is not None and slots > agent.slots:
            raise Refused(400, f"slots requested ({slots}) exceeds cluster capacity ({agent.slots})")
        return complete

    def _created(self, experiment: Experiment) -> dict[str, Any]:
        view = views.experiment_view(self._master, experiment)
        return {"experiment": view, "config": experiment.config, "warnings": []}

    @route("POST", "/api/v1/experiments/continue")
    def go_on(self, request: Call) -> dict[str, Any]:
        with self._master.lock():
            experiment = self._master.experiment(int(request.body["id"]))
            if experiment.state not in TERMINAL:
                raise Refused(400, f"experiment in non terminal state '{experiment.state}', try again later")
            override = parse(request.body.get("overrideConfig") or "") or {}
            complete = self._judged(merge(parse(experiment.original_config), override))
            if complete["searcher"]["name"] != experiment.searcher["name"]:
                raise Refused(400, "override config must have the searcher of the experiment")
            experiment.config = complete
            for trial in self._master.trials_of(experiment):
                if complete["searcher"]["name"] == "single":
                    trial.hparams = complete["hyperparameters"]
            self._master.revive(experiment)
            return self._created(experiment)

    @route("GET", "/api/v1/experiments")
    def experiments(self, request: Call) -> dict[str, Any]:
        found = [views.experiment_view(self._master, e) for e in self._master.experiments.values()]
        return views.page("experiments", found, request.query)

    @route("GET", "/api/v1/experiments/{experiment_id}")
    def experiment(self, request: Call, experiment_id: int) -> dict[str, Any]:
        with self._master.lock():
            experiment = self._master.experiment(experiment_id)
            return {
                "experiment": views.experiment_view(self._master, experiment),
                "config": experiment.config,
            }

    @route("POST", "/api/v1/experiments/{experiment_id}/{verb}")
    def set_state(self, request: Call, experiment_id: int, verb: str) -> None:
        if verb not in STATES:
            raise Refused(404, f"no such call: {request.path}")
        with self._master.lock():
            self._master.set_state(self._master.experiment(experiment_id), STATES[verb])

    # --- Trials and checkpoints -------------------------------------------------------------------------

    @route("GET", "/api/v1/experiments/{experiment_id}/trials")
    def trials(self, request: Call, experiment_id: int) -> dict[str, Any]:
        with self._master.lock():
            trials = self._master.trials_of(self._master.experiment(experiment_id))
            found = [views.trial_view(self._master, trial) for trial in trials]
        return views.page("trials", found, request.query)

    @route("GET", "/api/v1/trials/{trial_id}")
    def trial(self, request: Call, trial_id: int) -> dict[str, Any]:
        with self._master.lock():
            return {"trial": views.trial_view(self._master, self._master.trial(trial_id))}

    @route("GET", "/api/v1/experiments/{experiment_id}/checkpoints")
    def checkpoints(self, request: Call, experiment_id: int) -> dict[str, Any]:
        return self._checkpoints_of(self._master.trials_of(self._master.experiment(experiment_id)), request)

    @route("GET", "/api/v1/trials/{trial_id}/checkpoints")
    def trial_checkpoints(self, request: Call, trial_id: int) -> dict[str, Any]:
        return self._checkpoints_of([self._master.trial(trial_id)], request)

    def _checkpoints_of(self, trials: list[Trial], request: Call) -> dict[str, Any]:
        ids = {trial.id for trial in trials}
        with self._master.lock():
            found = [each for each in self._master.checkpoints.values() if each.trial_id in ids]
            return views.page(
                "checkpoints", [views.checkpoint_view(self._master, each) for each in found], request.query
            )

    @route("GET", "/api/v1/checkpoints/{checkpoint}")
    def checkpoint(self, request: Call, checkpoint: str) -> dict[str, Any]:
        with self._master.lock():
            if checkpoint not in self._master.checkpoints:
                raise Refused(404, f"checkpoint '{checkpoint}' not found")
            return {"checkpoint": views.checkpoint_view(self._master, self._master.checkpoints[checkpoint])}


def pack(files: list[dict[str, Any]]) -> bytes:
    """The context as the task gets it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in files:
            content = base64.b64decode(file.get("content") or "")
            entry = tarfile.TarInfo(file["path"])
            entry.type = bytes([int(file["type"])])
            entry.mode = int(file["mode"]) & 0o7777
            entry.mtime = int(file.get("mtime") or time.time())
            entry.size = len(content) if entry.isfile() else 0
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()
