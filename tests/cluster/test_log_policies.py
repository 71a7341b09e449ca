"""What no restart can help is started once, by the log policies of the templates, and its log says why in one line."""

from __future__ import annotations

import re

import pytest

from determined_ds.cluster_log import NO_RESTART_HELPS
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT
from tests.cluster.log_policies import LEVEL, RANK

CONST = "experiments/gpt2/const.yaml"
BY_DEEPSPEED = (
    "entrypoint=python3 -m determined.launch.deepspeed "
    "python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial"
)


def errors_in(log: str) -> list[str]:
    """The lines that the web UI shows of level ERROR, without their ranks."""
    lines = [RANK.sub("", line, count=1) for line in log.splitlines()]
    return [line for line in lines if (level := LEVEL.match(line)) and level[1] == "ERROR"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hyperparameters.global_batch_size=33"], "hyperparameters.global_batch_size = 33 .*; fix: use "),
        (["data.path=/nowhere"], "data.path = '/nowhere': no such file or folder.*; fix: "),
        (
            ["searcher.metric=validation_los"],
            "searcher.metric = 'validation_los': the trial reports .*; fix: ",
        ),
        (
            ["hyperparameters.learning_rate=1000000000000000000", BY_DEEPSPEED],
            "the loss was not finite at batch ",
        ),
    ],
    ids=["configuration", "data", "metric", "not finite"],
)
def test_a_failure_that_another_start_cannot_help_is_started_once(
    cluster: Cluster, overrides: list[str], said: str
) -> None:
    """Whatever ``max_restarts`` says; the log says why in a line with key, value, reason and fix."""
    number = cluster.create(CONST, *SHORT, *overrides)
    cluster.wait(number, "ERROR")
    trial = cluster.trial(number)
    why, *_, last = errors_in(cluster.log(trial))
    assert re.match(f"ERROR: {said}", why)
    assert last == NO_RESTART_HELPS
    assert (trial.run_id, trial.restarts, trial.log_policy) == (1, 0, "No restart helps")
