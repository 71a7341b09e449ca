"""What the client asks the master of its model registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.cluster import views
from tests.cluster.server import Refused, Request, route
from tests.cluster.state import USERNAME

if TYPE_CHECKING:
    from tests.cluster.master import Master


class RegistryApi:
    """Models and their versions.

    Args:
        master: Whose checkpoints they are.

    Attributes:
        models: Name -> model, as ``v1Model`` has it.
        versions: Name of a model -> its versions, without their checkpoints.
    """

    def __init__(self, master: Master) -> None:
        self._master = master
        self.models: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, list[dict[str, Any]]] = {}

    @route("GET", "/api/v1/models/{name}")
    def model(self, request: Request, name: str) -> dict[str, Any]:
        if name not in self.models:
            raise Refused(404, f"model {name!r} not found")
        return {"model": self.models[name]}

    @route("POST", "/api/v1/models")
    def create_model(self, request: Request) -> dict[str, Any]:
        name = request.body["name"]
        self.versions[name] = []
        self.models[name] = {
            "archived": False,
            "creationTime": self._master.started_at,
            "id": len(self.models) + 1,
            "lastUpdatedTime": self._master.started_at,
            "metadata": request.body.get("metadata") or {},
            "name": name,
            "numVersions": 0,
            "userId": 2,
            "username": USERNAME,
            "workspaceId": 1,
        }
        return {"model": self.models[name]}

    @route("POST", "/api/v1/models/{name}/versions")
    def create_version(self, request: Request, name: str) -> dict[str, Any]:
        uuid = request.body["checkpointUuid"]
        if uuid not in self._master.checkpoints:
            raise Refused(404, f"checkpoint {uuid!r} not found")
        versions = self.versions[name]
        versions.append({"version": len(versions) + 1, "uuid": uuid})
        return {"modelVersion": self._view(name, versions[-1])}

    @route("PATCH", "/api/v1/models/{name}/versions/{version_id}")
    def patch_version(self, request: Request, name: str, version_id: int) -> dict[str, Any]:
        version = self.versions[name][version_id - 1]
        version.update(request.body)
        return {"modelVersion": self._view(name, version)}

    def _view(self, name: str, version: dict[str, Any]) -> dict[str, Any]:
        checkpoint = self._master.checkpoints[version["uuid"]]
        return {
            **{key: value for key, value in version.items() if key != "uuid"},
            "checkpoint": views.checkpoint_view(self._master, checkpoint),
            "creationTime": self._master.started_at,
            "lastUpdatedTime": self._master.started_at,
            "id": version["version"],
            "model": self.models[name],
        }
