"""What no restart can help is started once, and says why where the web UI's filter "Error" finds it."""

from __future__ import annotations

import pytest

from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import TINY

CONST = "experiments/gpt2/const.yaml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hyperparameters.global_batch_size=31", "global_batch_size = 31"),
        ("hyperparameters.pipe_parallel_siz=2", "pipe_parallel_siz"),
        ("data.path=/nowhere", "/nowhere"),
        ("searcher.metric=validation_los", "validation_los"),
        ("hyperparameters.learning_rate=1.0e30", "not finite"),
    ],
    ids=["batch size", "misspelt hyperparameter", "data path", "metric", "loss"],
)
def test_it_is_started_once(cluster: RealCluster, override: str, said: str) -> None:
    [trial] = cluster.wait(cluster.create(CONST, *TINY, override), "STATE_ERROR")
    assert trial["restarts"] == 0
    assert any(said in line for line in cluster.errors(trial))
