"""What the ``det`` command line asks the master: its part of the REST API."""

from __future__ import annotations

import base64
import io
import tarfile
import time
import uuid
from typing import TYPE_CHECKING, Any

import yaml

from tests.cluster import views
from tests.cluster.configs import merge
from tests.cluster.server import Refused, Request, route
from tests.cluster.state import TERMINAL, USERNAME, VERSION, Experiment, Json

if TYPE_CHECKING:
    from tests.cluster.master import Master

MAX_CONTEXT_BYTES = 95 * 2**20


class ClientApi:
    """The calls of Determined's client.

    Args:
        master: Whose state they change.
    """

    def __init__(self, master: Master) -> None:
        self._master = master

    # --- The master, users ------------------------------------------------------------------------------

    @route("GET", "/info", is_open=True)
    def info(self, request: Request) -> dict[str, Any]:
        ids = {"cluster_id": self._master.cluster_id, "master_id": self._master.cluster_id}
        return {**ids, "cluster_name": "test", "version": VERSION}

    @route("GET", "/api/v1/master", is_open=True)
    def master_info(self, request: Request) -> dict[str, Any]:
        return {
            "version": VERSION,
            "masterId": self._master.cluster_id,
            "clusterId": self._master.cluster_id,
            "clusterName": "test",
            "hasCustomLogo": False,
            "strictJobQueueControl": False,
            "rbacEnabled": False,
        }

    @route("POST", "/api/v1/auth/login", is_open=True)
    def login(self, request: Request) -> dict[str, Any]:
        """The user ``determined`` is in, without a password."""
        if request.body["username"] != USERNAME or request.body.get("password"):
            raise Refused(401, "invalid credentials")
        token = f"user-{uuid.uuid4()}"
        self._master.tokens[token] = USERNAME
        return {"token": token, "user": self._user()}

    @route("GET", "/api/v1/me")
    def me(self, request: Request) -> dict[str, Any]:
        return {"user": self._user()}

    @route("GET", "/api/v1/auth/user")
    def current_user(self, request: Request) -> dict[str, Any]:
        return {"user": self._user()}

    def _user(self) -> dict[str, Any]:
        return {
            "id": 2,
            "username": USERNAME,
            "admin": True,
            "active": True,
            "agentUserGroup": None,
            "displayName": "",
            "modifiedAt": self._master.started_at,
            "remote": False,
            "lastAuthAt": self._master.started_at,
        }

    # --- Experiments ------------------------------------------------------------------------------------

    @route("POST", "/api/v1/experiments")
    def create(self, request: Request) -> dict[str, Any]:
        body = request.body
        try:
            config = yaml.safe_load(body["config"])
        except yaml.YAMLError as error:
            raise Refused(400, f"invalid experiment configuration: {error}") from error
        complete = self._judged(config)
        files = body.get("modelDefinition") or []
        sizes = {file["path"]: len(base64.b64decode(file.get("content") or "")) for file in files}
        if sum(sizes.values()) > MAX_CONTEXT_BYTES:
            raise Refused(400, f"model definition too large: {sum(sizes.values())} bytes")
        with self._master.lock():
            experiment = Experiment(
                id=len(self._master.experiments) + 1,
                config=complete,
                original_config=body["config"],
                context_tgz=pack(files),
                context_files=sizes,
                state="ACTIVE" if body.get("activate") else "PAUSED",
                username=request.user or "",
                job_id=str(uuid.uuid4()),
                parent_id=body.get("parentId"),
                name=complete["name"],
                description=complete.get("description") or "",
                labels=list(complete.get("labels") or []),
            )
            if not body.get("validateOnly"):
                self._master.add(experiment)
            return self._created(experiment)

    def _judged(self, config: Json) -> Json:
        found, complete = self._master.check(config, self._master.storage)
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
    def go_on(self, request: Request) -> dict[str, Any]:
        with self._master.lock():
            experiment = self._master.experiment(int(request.body["id"]))
            if experiment.state not in TERMINAL:
                raise Refused(400, f"experiment in non terminal state '{experiment.state}', try again later")
            override = yaml.safe_load(request.body.get("overrideConfig") or "") or {}
            complete = self._judged(merge(yaml.safe_load(experiment.original_config), override))
            if complete["searcher"]["name"] != experiment.searcher["name"]:
                raise Refused(400, "override config must have the searcher of the experiment")
            experiment.config = complete
            for trial in self._master.trials_of(experiment):
                if complete["searcher"]["name"] == "single":
                    trial.hparams = complete["hyperparameters"]
            self._master.revive(experiment)
            return self._created(experiment)

    @route("GET", "/api/v1/experiments")
    def experiments(self, request: Request) -> dict[str, Any]:
        found = [views.experiment_view(self._master, e) for e in self._master.experiments.values()]
        return views.page("experiments", found, request.query)

    @route("GET", "/api/v1/experiments/{experiment_id}")
    def experiment(self, request: Request, experiment_id: int) -> dict[str, Any]:
        with self._master.lock():
            experiment = self._master.experiment(experiment_id)
            return {
                "experiment": views.experiment_view(self._master, experiment),
                "config": experiment.config,
            }

    @route("PATCH", "/api/v1/experiments/{experiment_id}")
    def patch(self, request: Request, experiment_id: int) -> dict[str, Any]:
        with self._master.lock():
            experiment = self._master.experiment(experiment_id)
            experiment.name = request.body.get("name", experiment.name)
            experiment.description = request.body.get("description", experiment.description)
            experiment.labels = request.body.get("labels") or experiment.labels
            return {"experiment": views.experiment_view(self._master, experiment)}

    @route("GET", "/api/v1/experiments/{experiment_id}/model_def")
    def model_def(self, request: Request, experiment_id: int) -> dict[str, Any]:
        tgz = self._master.experiment(experiment_id).context_tgz
        return {"b64Tgz": base64.b64encode(tgz).decode()}

    @route("POST", "/api/v1/experiments/{experiment_id}/activate")
    def activate(self, request: Request, experiment_id: int) -> None:
        self._set_state(experiment_id, "ACTIVE")

    @route("POST", "/api/v1/experiments/{experiment_id}/pause")
    def pause(self, request: Request, experiment_id: int) -> None:
        self._set_state(experiment_id, "PAUSED")

    @route("POST", "/api/v1/experiments/{experiment_id}/cancel")
    def cancel(self, request: Request, experiment_id: int) -> None:
        self._set_state(experiment_id, "STOPPING_CANCELED")

    @route("POST", "/api/v1/experiments/{experiment_id}/kill")
    def kill(self, request: Request, experiment_id: int) -> None:
        self._set_state(experiment_id, "STOPPING_KILLED")

    @route("POST", "/api/v1/experiments/{experiment_id}/archive")
    def archive(self, request: Request, experiment_id: int) -> None:
        with self._master.lock():
            self._master.experiment(experiment_id).archived = True

    def _set_state(self, experiment_id: int, state: str) -> None:
        with self._master.lock():
            self._master.set_state(self._master.experiment(experiment_id), state)

    # --- Trials and checkpoints -------------------------------------------------------------------------

    @route("GET", "/api/v1/experiments/{experiment_id}/trials")
    def trials(self, request: Request, experiment_id: int) -> dict[str, Any]:
        with self._master.lock():
            trials = self._master.trials_of(self._master.experiment(experiment_id))
            found = [views.trial_view(self._master, trial) for trial in trials]
        return views.page("trials", found, request.query)

    @route("GET", "/api/v1/trials/{trial_id}")
    def trial(self, request: Request, trial_id: int) -> dict[str, Any]:
        with self._master.lock():
            return {"trial": views.trial_view(self._master, self._master.trial(trial_id))}

    @route("POST", "/api/v1/trials/{trial_id}/kill")
    def kill_trial(self, request: Request, trial_id: int) -> None:
        with self._master.lock():
            self._master.kill_trial(self._master.trial(trial_id))

    @route("GET", "/api/v1/trials/{trial_id}/workloads")
    def workloads(self, request: Request, trial_id: int) -> dict[str, Any]:
        with self._master.lock():
            found = views.workloads_view(self._master, self._master.trial(trial_id))
        return views.page("workloads", found, request.query)

    @route("GET", "/api/v1/experiments/{experiment_id}/checkpoints")
    def checkpoints(self, request: Request, experiment_id: int) -> dict[str, Any]:
        experiment = self._master.experiment(experiment_id)
        ids = {trial.id for trial in self._master.trials_of(experiment)}
        return self._checkpoint_page(ids, request, experiment)

    @route("GET", "/api/v1/trials/{trial_id}/checkpoints")
    def trial_checkpoints(self, request: Request, trial_id: int) -> dict[str, Any]:
        trial = self._master.trial(trial_id)
        return self._checkpoint_page({trial_id}, request, self._master.experiments[trial.experiment_id])

    def _checkpoint_page(self, trials: set[int], request: Request, experiment: Experiment) -> dict[str, Any]:
        with self._master.lock():
            of_trials = [c for c in self._master.checkpoints.values() if c.trial_id in trials]
            found = [views.checkpoint_view(self._master, checkpoint) for checkpoint in of_trials]
        if request.query.get("sortByAttr") == "SORT_BY_SEARCHER_METRIC":
            found = [view for view in found if view["training"].get("searcherMetric") is not None]
            down = not experiment.searcher.get("smaller_is_better", True)
            found.sort(key=lambda view: view["training"]["searcherMetric"], reverse=down)
        elif request.query.get("sortByAttr") == "SORT_BY_BATCH_NUMBER":
            down = request.query.get("orderBy") == "ORDER_BY_DESC"
            found.sort(key=lambda view: view["metadata"]["steps_completed"], reverse=down)
        return views.page("checkpoints", found, request.query)

    @route("GET", "/api/v1/checkpoints/{checkpoint}")
    def checkpoint(self, request: Request, checkpoint: str) -> dict[str, Any]:
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
