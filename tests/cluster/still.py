"""A master without an agent: its trials run, as far as it knows, and what they ask is asked by a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests
import yaml

from tests.cluster.api import USERNAME
from tests.cluster.http import Json
from tests.cluster.master import Master
from tests.cluster.state import Experiment


@contextmanager
def still_master() -> Iterator[Master]:
    """A master without an agent, with a user who is logged in."""
    master = Master(storage={"type": "shared_fs", "host_path": "/storage"})
    master.tokens["a user's"] = USERNAME
    try:
        yield master
        assert not master.server.errors
    finally:
        master.server.close()


def ask(
    master: Master, method: str, path: str, body: Json = None, *, token: str = "a user's"
) -> requests.Response:
    """Ask it, as the user or by another token."""
    headers = {"Authorization": f"Bearer {token}"}
    return requests.request(method, master.server.url + path, json=body, headers=headers, timeout=120)


def create(master: Master, config: Json) -> Experiment:
    """Create an experiment, all of whose first trials are started at once."""
    body = {"config": yaml.safe_dump(config), "activate": True}
    answer = ask(master, "POST", "/api/v1/experiments", body)
    assert answer.status_code == 200, answer.text
    return master.experiments[answer.json()["experiment"]["id"]]
