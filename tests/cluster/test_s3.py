"""Checkpoints in S3, by the real ``det``, harness and boto3: paused, resumed, downloaded, and begun with by a fork."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds import load_model_from_checkpoint_path
from determined_ds.protocol.checkpoint_files import damage_of
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import SHORT, RunHere
from tests.cluster.state import Checkpoint, Trial

pytestmark = pytest.mark.long("a cluster whose checkpoints are in S3; test_object_storage has them on ranks")

CONST = "experiments/gpt2/const.yaml"


@pytest.fixture(scope="module")
def storage(s3: dict[str, Any]) -> list[str]:
    """``checkpoint_storage``, as overrides of a config."""
    return [f"checkpoint_storage.{key}={value}" for key, value in {**s3, "prefix": "of/a/team"}.items()]


@pytest.fixture(scope="module")
def paused(cluster: Cluster, storage: list[str]) -> Trial:
    """A trial that was paused after its first report, activated, and has ended."""
    number = cluster.create(CONST, *SHORT, *storage, paused=True)
    trial = cluster.trial(number)
    held = cluster.hold_at_report(trial, 1)
    cluster.activate(number)
    cluster.wait_for_report(trial, "training", 2)
    cluster.pause(number, held)
    assert (trial.state, trial.allocations[0].exit_code) == ("PAUSED", 0)
    assert 2 < cluster.checkpoints(trial)[-1].steps < 5
    cluster.activate(number)
    cluster.wait(number)
    assert (trial.state, trial.run_id, trial.restarts) == ("COMPLETED", 2, 0)
    return trial


def test_paused_and_activated_it_ends_as_if_it_never_was(
    cluster: Cluster, paused: Trial, run_here: Callable[[str], RunHere]
) -> None:
    expected = run_here(CONST).metrics
    for group in ("training", "validation"):
        assert cluster.metrics(paused, group) == expected[group]
    assert not list(cluster.storage.glob(f"{last(cluster, paused).uuid}*"))


def last(cluster: Cluster, trial: Trial) -> Checkpoint:
    """The last checkpoint of a trial."""
    return cluster.checkpoints(trial)[-1]


def test_what_the_master_lists_is_what_is_downloaded(cluster: Cluster, paused: Trial, tmp_path: Path) -> None:
    """``metadata.json`` among it; the model loads from there. Without that file, ``det`` writes the master's."""
    from tests.object_storage import BUCKET, manager_of

    checkpoint = last(cluster, paused)
    got = download(cluster, checkpoint, tmp_path / "got")
    there = {str(path.relative_to(got)) for path in got.rglob("*") if path.is_file()}
    assert there == {name for name in checkpoint.body["resources"] if not name.endswith("/")}
    assert {"metadata.json", "manifest.json", "code/determined_ds/train.py"} <= there
    assert load_model_from_checkpoint_path(got, context_dir=".").training is False

    config = cluster.experiment(paused.experiment_id).config["checkpoint_storage"]
    kept = {key: value for key, value in config.items() if not key.startswith("save_")}
    assert (kept["type"], kept["bucket"]) == ("s3", BUCKET)
    manager_of(kept, tmp_path).delete(checkpoint.uuid, ["metadata.json"])
    again = download(cluster, checkpoint, tmp_path / "again")
    assert json.loads((again / "metadata.json").read_text())["steps_completed"] == 10
    assert damage_of(again) is None


def download(cluster: Cluster, checkpoint: Checkpoint, path: Path) -> Path:
    """``det checkpoint download``."""
    cluster.det("checkpoint", "download", checkpoint.uuid, "-o", path)
    return path


def test_a_fork_begins_with_its_weights(cluster: Cluster, paused: Trial, storage: list[str]) -> None:
    source = last(cluster, paused)
    override = f"searcher.source_checkpoint_uuid={source.uuid}"
    number = cluster.create(CONST, *SHORT, *storage, override)
    cluster.wait(number)
    fork = cluster.trial(number)
    assert f"warm start  batch 10 of trial {paused.id}, checkpoint {source.uuid}" in cluster.log(fork)
    first = [trial.of_group("training")[0].metrics["loss"] for trial in (fork, paused)]
    assert first[0] < first[1]
