"""What a master refuses, this one does, and the client shows; what it is sent is what a trial needs."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.command import ROOT

CONST = "experiments/gpt2/const.yaml"


def ask(cluster: Cluster, method: str, path: str, token: str = "", body: Any = None) -> tuple[int, Any]:
    """A call as any client could make it: status and answer."""
    request = urllib.request.Request(
        cluster.master.server.url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def token(cluster: Cluster) -> str:
    """Of the user ``determined``."""
    body = {"username": "determined", "password": ""}
    return str(ask(cluster, "POST", "/api/v1/auth/login", body=body)[1]["token"])


def test_who_is_not_known_is_not_answered(cluster: Cluster, token: str) -> None:
    assert ask(cluster, "GET", "/info")[0] == 200
    assert ask(cluster, "GET", "/api/v1/me")[0] == 401
    assert ask(cluster, "GET", "/api/v1/me", "made up")[0] == 401
    assert ask(cluster, "GET", "/api/v1/me", token)[0] == 200
    login = {"username": "somebody", "password": "guessed"}
    assert ask(cluster, "POST", "/api/v1/auth/login", body=login)[0] == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/experiments/99"),
        ("POST", "/api/v1/experiments/99/activate"),
        ("GET", "/api/v1/trials/99"),
        ("GET", "/api/v1/trials/99/logs"),
        ("GET", "/api/v1/checkpoints/none"),
        ("GET", "/api/v1/tasks/none/context_directory"),
        ("GET", "/api/v1/no/such/call"),
    ],
)
def test_what_is_not_there_is_not_found(cluster: Cluster, token: str, method: str, path: str) -> None:
    assert ask(cluster, method, path, token)[0] == 404


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("searcher.name=newton", "searcher"),
        ("max_restarts=-1", "max_restarts"),
        ("hyperparameters.optimizer={type: AdamW}", "hyperparameters.optimizer"),
        ("resources.slots_per_trial=64", "cluster capacity"),
    ],
)
def test_a_bad_config_is_refused_by_its_key(cluster: Cluster, override: str, key: str) -> None:
    done = cluster.det("experiment", "create", CONST, ".", "--config", override, check=False)
    assert done.returncode != 0
    assert key in done.stderr
    assert "Created experiment" not in done.stdout


def test_only_validated_it_is_not_created(cluster: Cluster, token: str) -> None:
    before = len(cluster.master.experiments)
    body = {"config": (ROOT / CONST).read_text(), "validateOnly": True, "activate": True}
    assert ask(cluster, "POST", "/api/v1/experiments", token, body)[0] == 200
    assert len(cluster.master.experiments) == before


def test_a_context_that_is_too_large_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """By the client already; the file is sparse, but it does not know."""
    with (tmp_path / "large.bin").open("wb") as file:
        os.truncate(file.fileno(), 96 * 2**20)
    done = cluster.det("experiment", "create", ROOT / CONST, tmp_path, check=False)
    assert done.returncode != 0
    assert "maximum allowed size" in done.stdout + done.stderr


def test_metrics_of_an_ended_run_are_refused(cluster: Cluster, token: str) -> None:
    number = cluster.create(CONST, paused=True)
    trial = cluster.trial(number)
    metrics = {
        "trialId": trial.id,
        "trialRunId": 7,
        "stepsCompleted": 1,
        "metrics": {"avgMetrics": {"loss": 1.0}},
    }
    body = {"group": "training", "metrics": metrics}
    status, answer = ask(cluster, "POST", f"/api/v1/trials/{trial.id}/metrics", token, body)
    assert (status, answer["error"]["error"]) == (400, "invalid run id, 7 (reported) != 0 (expected)")
    cluster.det("experiment", "cancel", str(number))
    metrics["trialRunId"] = 0
    assert ask(cluster, "POST", f"/api/v1/trials/{trial.id}/metrics", token, body)[0] == 400
    assert not trial.reports
