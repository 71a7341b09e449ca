"""Checkpoints in S3, by the real ``det``, harness and boto3: paused, resumed, downloaded, and begun with by a fork.

On our cluster alone: the S3 server answers this machine only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds import load_model_from_checkpoint_path
from tests.cluster.cluster import FakeCluster, metrics_of
from tests.cluster.scenarios import CONST, SHORT
from tests.package import damage

pytestmark = pytest.mark.long("a cluster whose checkpoints are in S3; test_object_storage has them on ranks")


def test_a_trial_is_paused_downloaded_and_begun_with_from_there(
    fake: FakeCluster, s3: dict[str, Any], run_here: Callable[..., Path], tmp_path: Path
) -> None:
    storage = [f"checkpoint_storage.{key}={value}" for key, value in {**s3, "prefix": "of/a/team"}.items()]
    number = fake.create(CONST, *SHORT, *storage, paused=True)
    assert 2 <= fake.stop(number, at=2) < 5
    fake.activate(number)
    [trial] = fake.wait(number)
    assert (trial.restarts, len(fake.starts(trial))) == (0, 2)
    assert fake.metrics(trial) == metrics_of(run_here(CONST, *SHORT))

    checkpoint = fake.checkpoints(trial)[-1]
    assert not list(fake.storage.glob(f"{checkpoint.uuid}*"))
    got = tmp_path / "got"
    fake.det("checkpoint", "download", checkpoint.uuid, "-o", got)
    assert {str(path.relative_to(got)) for path in got.rglob("*") if path.is_file()} == set(checkpoint.files)
    assert {"metadata.json", "manifest.json", "code/model_defs/gpt2/trial.py"} <= set(checkpoint.files)
    assert damage(got) is None
    assert load_model_from_checkpoint_path(got, context_dir=".").training is False

    source = f"searcher.source_checkpoint_uuid={checkpoint.uuid}"
    [fork] = fake.wait(fake.create(CONST, *SHORT, *storage, source))
    assert f"warm start  batch 10 of trial {trial.id}, checkpoint {checkpoint.uuid}" in fake.log(fork)
    first = [fake.reports(each, "training")[0][1]["loss"] for each in (fork, trial)]
    assert first[0] < first[1]
