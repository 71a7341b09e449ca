"""The end of a run: the checkpoints that ``checkpoint_storage.save_*`` does not keep are deleted, as by a master.

Which those are is in ``protocol/test_kept_checkpoints.py``.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.metrics_file import read_records
from tests.command import ROOT, Started
from tests.runtime.test_resume import experiment, run

LENGTH, STORAGE = "hyperparameters.fit.max_length.batches", "checkpoint_storage"


def written(folder: Path, **keys: Any) -> Path:
    """One rank, 8 batches; checkpoints after every second one, validations after every third, the first is the best."""
    config = experiment(zero=1)
    config["resources"]["slots_per_trial"] = 1
    config["searcher"]["smaller_is_better"] = False
    config["hyperparameters"]["fit"] = {
        "max_length": {"batches": 8},
        "validation_period": {"batches": 3},
        "checkpoint_period": {"batches": 2},
    }
    config.update(keys)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def steps_of(run_dir: Path) -> list[int]:
    return sorted(found.steps_completed for found in checkpoints_in(run_dir / "checkpoints"))


def linked(run_dir: Path) -> list[int]:
    """The batches of ``best`` and ``last``."""
    return [
        json.loads((run_dir / name / "metadata.json").read_text())["steps_completed"]
        for name in ("best", "last")
    ]


def test_where_nothing_is_stated_all_are_kept(tmp_path: Path) -> None:
    done = run(written(tmp_path), tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "deleted" not in done.stdout
    assert steps_of(tmp_path / "run") == [2, 3, 4, 6, 8]
    validated = {
        r["steps_completed"]: r["metrics"] for r in read_records(tmp_path / "run/metrics.jsonl", "validation")
    }
    assert max(validated, key=lambda batch: validated[batch]["validation_loss"]) == 3
    assert linked(tmp_path / "run") == [3, 8]


def test_a_run_is_pruned_at_its_end_and_can_be_resumed(tmp_path: Path) -> None:
    """Kept: the best, the latest with a validation, the latest without one."""
    config, run_dir = written(tmp_path, checkpoint_storage={"save_trial_best": 1}), tmp_path / "run"
    done = run(config, run_dir)
    assert done.returncode == 0, done.stderr
    assert "ignored here" not in done.stderr
    assert steps_of(run_dir) == [3, 4, 8]
    said = "save_experiment_best 0, save_trial_best 1, save_trial_latest 1"
    assert (
        f"deleted     2 checkpoints that checkpoint_storage does not keep ({said}): batch 2, batch 6"
        in done.stdout
    )
    assert linked(run_dir) == [3, 8]
    result = json.loads((run_dir / "result.json").read_text())
    assert sorted(each["steps_completed"] for each in result["deleted"]) == [2, 6]
    assert (result["steps_completed"], result["checkpoint"]["steps_completed"]) == (8, 8)
    resumed = run(config, run_dir, "--resume", "--set", f"{LENGTH}=10")
    assert resumed.returncode == 0, resumed.stderr
    assert "resume     batch 8" in resumed.stdout
    assert steps_of(run_dir) == [3, 4, 10]  # 4 is the latest without a validation: 9 and 10 have one
    fewer = run(config, run_dir, "--resume", "--set", f"{LENGTH}=10", "--set", f"{STORAGE}.save_trial_best=0")
    assert "this run is complete: 10 of 10 batches" in fewer.stdout
    assert steps_of(run_dir) == [4, 10]
    assert linked(run_dir) == [10, 10]


def test_a_run_without_its_last_checkpoint_is_complete_all_the_same(tmp_path: Path) -> None:
    stated = {"save_trial_best": 1, "save_trial_latest": 0}
    config, run_dir = written(tmp_path, checkpoint_storage=stated), tmp_path / "run"
    assert run(config, run_dir).returncode == 0
    assert steps_of(run_dir) == [3]
    assert linked(run_dir) == [3, 3]
    metrics = (run_dir / "metrics.jsonl").read_text()
    again = run(config, run_dir, "--resume")
    assert (again.returncode, "this run is complete: 8 of 8 batches" in again.stdout) == (0, True)
    assert (run_dir / "metrics.jsonl").read_text() == metrics
    longer = run(config, run_dir, "--resume", "--set", f"{LENGTH}=9")
    assert longer.returncode == 0, longer.stderr
    assert (
        "the checkpoint of batch 8, its end, was deleted: checkpoint_storage.save_*; resuming from batch 3"
        in longer.stderr
    )
    assert steps_of(run_dir) == [3]


def test_a_run_without_checkpoints_is_never_begun_anew_by_mistake(tmp_path: Path) -> None:
    stated = {"save_trial_best": 0, "save_trial_latest": 0}
    config, run_dir = written(tmp_path, checkpoint_storage=stated), tmp_path / "run"
    assert run(config, run_dir).returncode == 0
    assert steps_of(run_dir) == []
    assert not any((run_dir / name).is_symlink() for name in ("best", "last"))
    metrics = (run_dir / "metrics.jsonl").read_text()
    assert "this run is complete: 8 of 8 batches" in run(config, run_dir, "--resume").stdout
    for words in (["--resume", "--set", f"{LENGTH}=9"], ["--resume", "--test"], []):
        refused = run(config, run_dir, *words)
        assert refused.returncode == 2, words
        assert "holds a complete run" in refused.stderr
    assert (run_dir / "metrics.jsonl").read_text() == metrics


def test_a_limit_while_training_and_the_policy_at_the_end(tmp_path: Path) -> None:
    """Each deletes at its time: what both keep is left."""
    config = written(tmp_path, checkpoint_storage={"save_trial_best": 0})
    done = run(config, tmp_path / "run", "--set", "hyperparameters.fit.save_total_limit=3")
    assert done.returncode == 0, done.stderr
    assert "save_trial_best 0, save_trial_latest 1): batch 3, batch 6" in done.stdout
    assert steps_of(tmp_path / "run") == [8]  # the limit has left 3, the best until then, 6 and 8


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_what_may_be_resumed_keeps_its_checkpoints(how: str, tmp_path: Path) -> None:
    config = written(tmp_path, checkpoint_storage={"save_trial_best": 0})
    if how == "failed":
        assert run(config, tmp_path / "run", KILL_AT="after:7").returncode == 1
        assert steps_of(tmp_path / "run") == [2, 3, 4, 6]
        return
    process = Started(
        "run", config, ROOT, "--run-dir", tmp_path / "run", "--set", f"{LENGTH}=1000000", merged=True
    )
    for line in process.stdout:
        if "checkpoint  batch 4" in line:
            os.killpg(process.pid, signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 0
    assert "deleted" not in rest
    assert steps_of(tmp_path / "run")[:3] == [2, 3, 4]
    assert linked(tmp_path / "run")[1] == steps_of(tmp_path / "run")[-1]


@pytest.mark.parametrize(
    ("value", "said"), [("-1", "must be 0 or more"), ("x", "must be an integer, not a string")]
)
def test_what_is_no_number_is_refused_before_anything_starts(value: str, said: str, tmp_path: Path) -> None:
    refused = run(written(tmp_path), tmp_path / "run", "--set", f"{STORAGE}.save_trial_best={value}")
    assert refused.returncode == 2
    assert said in refused.stderr
