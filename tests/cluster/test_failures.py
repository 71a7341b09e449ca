"""What no restart can help is started once, and says why where the web UI's filter "Error" finds it."""

from __future__ import annotations

import re

import pytest
from determined.common.api import bindings

from tests.cluster.cluster import Cluster
from tests.cluster.scenarios import CONST, SHORT, ZB_H1, by_launcher
from tests.package import NO_RESTART_HELPS

CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "configuration": (
        CONST,
        ("hyperparameters.global_batch_size=33",),
        r"hyperparameters\.global_batch_size = 33 .*; fix: use ",
    ),
    "data path": (CONST, ("data.path=/nowhere",), r"data\.path = '/nowhere': .*; fix: "),
    "loss, launched by deepspeed": (
        CONST,
        ("hyperparameters.learning_rate=1.0e30", by_launcher(CONST, "deepspeed")),
        "the loss was not finite at batch ",
    ),
    "schedule": (ZB_H1, ("hyperparameters.activation_checkpoint_interval=1",), "zb-h1"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_started_once_and_its_errors_say_why(cluster: Cluster, name: str) -> None:
    """Whatever ``max_restarts`` says; in one line with key, value, reason and fix."""
    path, overrides, said = CASES[name]
    [trial] = cluster.wait(cluster.create(path, *SHORT, *overrides), "ERROR")
    assert (trial.restarts, len(cluster.starts(trial))) == (0, 1)
    errors = cluster.log(trial, bindings.v1LogLevel.ERROR)
    assert re.search(said, errors), errors
    assert NO_RESTART_HELPS.removeprefix("ERROR: ") in errors.splitlines()[-1]
