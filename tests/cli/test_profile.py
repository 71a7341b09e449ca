"""``det-ds profile``: a run that is recorded, its parts, and what it cannot read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness.command import det_ds

SMALL = ("--set", "hyperparameters.global_batch_size=8", "--set", "hyperparameters.sequence_length=32")


@pytest.mark.long("test_capture records steps; test_analysis takes them apart")
def test_a_pipeline_is_recorded_without_checkpoints_and_its_step_taken_apart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["experiments/gpt2/pipeline.yaml", ".", *SMALL, *["--steps", "2", "--warmup", "2"]]
    done = det_ds("profile", *words, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    assert "A step taken apart: " in done.stdout
    assert not list((run_dir / "checkpoints").iterdir())
    found = json.loads((run_dir / "profile" / "profile.json").read_text())
    assert [(rank["rank"], rank["pipe_stage"]) for rank in found["ranks"]] == [(0, 0), (1, 1)]
    assert all(found["seconds"][part] for part in ("data", "forward", "backward", "pipeline", "optimizer"))
    files = {path.name for path in (run_dir / "profile").iterdir()}
    assert files >= {"profile.json", "profile.png", "schedule.png", "rank0.json.gz", "rank1.json.gz"}

    moved = tmp_path / "brought"
    shutil.copytree(run_dir / "profile", moved)
    (moved / "profile.json").unlink()
    again = det_ds("profile", moved)
    assert again.returncode == 0, again.stderr
    assert json.loads((moved / "profile.json").read_text())["step_s"] == found["step_s"]


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    done = det_ds("profile", tmp_path)
    assert done.returncode == 2
    assert "holds no traces" in done.stderr
    assert "fix: record some" in done.stderr
