"""A master whose trials run, as far as it knows, and do nothing: what they ask is asked by a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests
import yaml

from tests.cluster.master import Master
from tests.cluster.state import USERNAME, Experiment, Json


@contextmanager
def still_master() -> Iterator[Master]:
    """A master without an agent."""
    master = Master(storage={"type": "shared_fs", "host_path": "/storage"})
    try:
        yield master
        assert not master.server.errors
    finally:
        master.server.close()


class User:
    """A user of a master, logged in."""

    def __init__(self, master: Master) -> None:
        self._master = master
        self._token = ""
        self._token = self.call("POST", "/api/v1/auth/login", {"username": USERNAME}).json()["token"]

    def call(
        self, method: str, path: str, body: Json = None, *, token: str | None = None
    ) -> requests.Response:
        """Ask the master, as the user or by another token."""
        headers = {"Authorization": f"Bearer {token or self._token}"}
        url = self._master.server.url + path
        return requests.request(method, url, json=body, headers=headers, timeout=120)

    def create(self, config: Json) -> Experiment:
        """Create an experiment, all of whose first trials are started at once."""
        body = {"config": yaml.safe_dump(config), "activate": True, "modelDefinition": []}
        answer = self.call("POST", "/api/v1/experiments", body)
        assert answer.status_code == 200, answer.text
        return self._master.experiments[answer.json()["experiment"]["id"]]
