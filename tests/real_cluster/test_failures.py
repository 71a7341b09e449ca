"""What no restart can help is started once, and says why where the web UI's filter "Error" finds it."""

from __future__ import annotations

import pytest

from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import TINY

CONST, ZB_H1, INTERLEAVED = (f"experiments/gpt2/{name}.yaml" for name in ("const", "zb_h1", "interleaved"))


@pytest.mark.parametrize(
    ("path", "override", "said"),
    [
        (CONST, "hyperparameters.global_batch_size=31", "global_batch_size = 31"),
        (CONST, "hyperparameters.pipe_parallel_siz=2", "pipe_parallel_siz"),
        (CONST, "data.path=/nowhere", "/nowhere"),
        (CONST, "searcher.metric=validation_los", "validation_los"),
        (CONST, "hyperparameters.learning_rate=1.0e30", "not finite"),
        (ZB_H1, "hyperparameters.activation_checkpoint_interval=1", "zb-h1"),
        (INTERLEAVED, "hyperparameters.pipe_chunks=3", "3 chunks"),
    ],
    ids=["batch size", "misspelt hyperparameter", "data path", "metric", "loss", "schedule", "chunks"],
)
def test_it_is_started_once(cluster: RealCluster, path: str, override: str, said: str) -> None:
    [trial] = cluster.wait(cluster.create(path, *TINY, override), "STATE_ERROR")
    assert trial["restarts"] == 0
    assert any(said in line for line in cluster.errors(trial))
