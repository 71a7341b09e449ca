"""``det-ds run --storage``: checkpoints in the experiment's ``checkpoint_storage``, here an S3 server and a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from determined_ds.protocol.checkpoint_files import checkpoints_in, damage_of
from tests.command import det_ds
from tests.object_storage import BUCKET, manager_of

CRASH = """
    def train_batch(self, batches, epoch, batch):
        import os, pathlib, signal
        flag = pathlib.Path({folder!r}) / "crashed"
        if batch == {batch} and self.context.distributed.rank == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(batches, epoch, batch)
"""
LENGTH = "hyperparameters.fit.max_length.batches"


def changed(own_model: Path, storage: dict[str, Any] | None, more: str = "", **keys: Any) -> None:
    config = yaml.safe_load((own_model / "experiment.yaml").read_text())
    config.update(keys)
    config.update({"checkpoint_storage": storage} if storage else {})
    (own_model / "experiment.yaml").write_text(yaml.safe_dump(config))
    with (own_model / "trial.py").open("a") as trial:
        trial.write(more)


def run(own_model: Path, run_dir: Path, *words: str) -> Any:
    config = own_model / "experiment.yaml"
    return det_ds("run", config, own_model, "--run-dir", run_dir, *words)


def objects(storage: dict[str, Any]) -> set[str]:
    """The uuids of the checkpoints in the bucket."""
    access = {"aws_access_key_id": storage["access_key"], "aws_secret_access_key": storage["secret_key"]}
    client = boto3.client("s3", endpoint_url=storage["endpoint_url"], region_name="us-east-1", **access)
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{storage['prefix']}/").get("Contents", [])
    return {entry["Key"].split("/")[1] for entry in found}


def losses(run_dir: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["steps_completed"], r["metrics"]["loss"]) for r in records if r["group"] == "training"]


@pytest.fixture
def storage(s3: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return {**s3, "prefix": tmp_path.name}


def test_a_run_crashes_restarts_and_resumes_by_s3_alone(
    own_model: Path, storage: dict[str, Any], tmp_path: Path
) -> None:
    """One that never stopped, kept in its run directory, ends with the same losses."""
    changed(own_model, None)
    assert run(own_model, tmp_path / "whole").returncode == 0
    changed(own_model, storage, CRASH.format(folder=str(tmp_path), batch=3), max_restarts=1)
    run_dir = tmp_path / "run"
    done = run(own_model, run_dir, "--storage", "--set", f"{LENGTH}=4")
    assert done.returncode == 0, done.stderr
    assert re.search(r"restart 1 of 1 from checkpoint \S+ at batch 2", done.stderr)
    assert "checkpoint_storage" not in done.stderr, "it is not ignored"
    done = run(own_model, run_dir, "--storage", "--resume")
    assert done.returncode == 0, done.stderr
    assert "  resume     batch 4, checkpoint " in done.stdout
    assert losses(run_dir) == losses(tmp_path / "whole")

    indexes = checkpoints_in(run_dir / "checkpoints")
    assert [index.steps_completed for index in indexes] == [6, 4, 2]
    assert {index.uuid for index in indexes} == objects(storage)
    kept = {file.name for index in indexes for file in index.path.iterdir()}
    assert kept == {"stored.json", "metadata.json", "trial_state.json", "load_data.json"}
    assert storage["secret_key"] not in (run_dir / "experiment.yaml").read_text()
    fetched = tmp_path / "fetched"
    manager_of(storage, tmp_path / "tmp").download(indexes[0].uuid, fetched)
    assert damage_of(fetched) is None
    assert len(list(fetched.glob("det_state_dict_rank*.pth"))) == 2

    # The stored experiment goes on where the environment has the keys, and says so where it has not.
    words = ["run", str(run_dir / "experiment.yaml"), str(own_model), "--run-dir", str(run_dir)]
    words += ["--resume", "--set", f"{LENGTH}=8", "--accelerator", "cpu"]
    without = CliRunner().invoke(main, [*words, "--storage"], env={SECRET: None})
    assert (without.exit_code, SECRET in without.stderr) == (EXIT_CONFIG, True), without.stderr
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == EXIT_CONFIG
    assert "is in checkpoint_storage" in refused.stderr
    assert "fix: add --storage" in refused.stderr


SECRET = "DET_DS_CHECKPOINT_STORAGE_SECRET_KEY"


def test_at_the_end_what_is_not_kept_is_deleted_there_too(
    own_model: Path, storage: dict[str, Any], tmp_path: Path
) -> None:
    changed(own_model, {**storage, "save_trial_best": 0})
    every_batch = ["--set", "hyperparameters.fit.checkpoint_period.batches=1", "--set", f"{LENGTH}=4"]
    done = run(own_model, tmp_path / "run", "--storage", *every_batch)
    assert done.returncode == 0, done.stderr
    assert "deleted     " in done.stdout
    kept = {index.uuid for index in checkpoints_in(tmp_path / "run/checkpoints")}
    assert kept == objects(storage)
    assert 1 <= len(kept) <= 2  # the latest with a validation, and without one
    resumed = run(own_model, tmp_path / "run", "--storage", "--resume", "--set", f"{LENGTH}=5")
    assert resumed.returncode == 0, resumed.stderr
    assert "resume     batch 4" in resumed.stdout


def test_a_folder_does_as_well_and_its_limit_holds(own_model: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    changed(own_model, {"type": "shared_fs", "host_path": str(shared), "storage_path": "some"})
    words = ["--storage", "--set", "hyperparameters.fit.save_total_limit=1"]
    done = run(own_model, tmp_path / "run", *words)
    assert done.returncode == 0, done.stderr
    kept = {index.uuid for index in checkpoints_in(tmp_path / "run/checkpoints")}
    assert kept == {path.name for path in (shared / "some").iterdir()}
    assert 0 < len(kept) < 3
    assert all(damage_of(path) is None for path in (shared / "some").iterdir())


def test_another_runs_is_continued_from_its_index_and_is_not_this_ones_to_delete(
    own_model: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    changed(own_model, {"type": "shared_fs", "host_path": str(shared), "storage_path": "some"})
    assert run(own_model, tmp_path / "run", "--storage", "--set", f"{LENGTH}=4").returncode == 0
    origin = checkpoints_in(tmp_path / "run/checkpoints")
    words = ["--resume", str(origin[1].path), "--set", "hyperparameters.fit.save_total_limit=1"]
    refused = run(own_model, tmp_path / "new", *words)
    assert refused.returncode == EXIT_CONFIG
    assert "fix: add --storage" in refused.stderr
    done = run(own_model, tmp_path / "new", "--storage", *words)
    assert done.returncode == 0, done.stderr
    assert [step for step, _ in losses(tmp_path / "new")] == [3, 4, 5, 6]
    kept = {each.uuid for each in (*origin, *checkpoints_in(tmp_path / "new/checkpoints"))}
    assert kept == {path.name for path in (shared / "some").iterdir()}
    assert len(kept) > len(origin)


def test_what_cannot_be_written_to_is_refused_before_the_first_batch(
    own_model: Path, storage: dict[str, Any], tmp_path: Path
) -> None:
    changed(own_model, {**storage, "bucket": "of-nobody"})
    done = run(own_model, tmp_path / "run", "--storage")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert "checkpoint_storage = 's3': nothing can be written there and read back" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run/metrics.jsonl").read_text()


def test_storage_that_is_not_named_is_refused(own_model: Path, tmp_path: Path) -> None:
    words = ["run", str(own_model / "experiment.yaml"), str(own_model), "--run-dir", str(tmp_path / "run")]
    done = CliRunner().invoke(main, [*words, "--storage", "--accelerator", "cpu"])
    assert done.exit_code == EXIT_CONFIG
    assert "--storage: the experiment has no checkpoint_storage" in done.stderr
