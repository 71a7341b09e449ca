"""``fit.profile`` on a cluster: traces are uploaded with the files for TensorBoard, and are read from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from determined_ds.profile.analysis import analyse
from determined_ds.protocol.profile_files import traces_in
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT

pytestmark = pytest.mark.programs
PROFILE = "hyperparameters.fit.profile={wait: 1, warmup: 1, active: 2}"


@pytest.mark.long("runtime/profiling/test_capture.py records here")
def test_traces_are_in_the_storage_of_the_experiment(cluster: Cluster, tmp_path: Path) -> None:
    number = cluster.create("experiments/gpt2/const.yaml", *SHORT, PROFILE)
    cluster.wait(number)
    uploaded = [
        path for path in cluster.storage.rglob("rank*.trace.json.gz") if f"/experiment/{number}/" in str(path)
    ]
    assert sorted(path.name for path in uploaded) == ["rank0#0.pt.trace.json.gz", "rank1#1.pt.trace.json.gz"]
    for path in uploaded:
        shutil.copy(path, tmp_path)
    profile = analyse(traces_in(tmp_path))
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    assert all([step.batch for step in rank.steps] == [3, 4] for rank in profile.ranks)
