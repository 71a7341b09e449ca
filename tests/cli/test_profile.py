"""``det-ds profile``: a run that is recorded, its parts, and what it cannot read."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command import det_ds

SMALL = ("--set", "hyperparameters.global_batch_size=8", "--set", "hyperparameters.sequence_length=32")
WITHIN = 0.02


def recorded(config: str, run_dir: Path, *options: str) -> dict[str, Any]:
    """``profile.json`` of two steps after two, whose parts add up to the loop's own clock."""
    done = det_ds("profile", config, ".", *options, "--steps", "2", "--warmup", "2", "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    assert "A step taken apart: " in done.stdout
    assert not list((run_dir / "checkpoints").iterdir())
    found: dict[str, Any] = json.loads((run_dir / "profile" / "profile.json").read_text())
    assert [rank["rank"] for rank in found["ranks"]] == list(range(found["num_ranks"]))
    for rank in found["ranks"]:
        assert [step["batch"] for step in rank["steps"]] == [3, 4]
    steps = [step for rank in found["ranks"] for step in rank["steps"]]
    ratios = [sum(step["seconds"].values()) / step["clock_s"] for step in steps]
    assert statistics.median(ratios) == pytest.approx(1, abs=WITHIN)  # a rank may be put off between the two
    return found


@pytest.mark.long("test_capture records steps; test_host_parts takes them apart")
def test_a_pipeline_is_recorded_without_checkpoints_and_its_step_taken_apart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    found = recorded("experiments/gpt2/pipeline.yaml", run_dir, *SMALL)
    assert found["pipe_parallel_size"] == 2
    assert [rank["pipe_stage"] for rank in found["ranks"]] == [0, 1]
    assert all(found["seconds"][part] for part in ("data", "forward", "backward", "pipeline", "optimizer"))
    files = {path.name for path in (run_dir / "profile").iterdir()}
    assert files >= {"profile.json", "profile.png", "schedule.png", "rank0.json.gz", "rank1.json.gz"}

    moved = tmp_path / "brought"
    shutil.copytree(run_dir / "profile", moved)
    again = det_ds("profile", moved, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["step_s"] == found["step_s"]


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    done = det_ds("profile", tmp_path)
    assert done.returncode == 2
    assert "holds no traces" in done.stderr
    assert "fix: record some" in done.stderr
