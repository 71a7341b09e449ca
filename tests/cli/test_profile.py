"""``det-ds profile``: a run that records, its parts, and traces from elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.command import det_ds
from tests.profile.written_trace import mark, written

SMALL = ("--set", "hyperparameters.global_batch_size=8", "--set", "hyperparameters.sequence_length=32")


def test_it_records_a_run_without_checkpoints_and_takes_a_step_apart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ("profile", "experiments/gpt2/const.yaml", ".", *SMALL, "--steps", "2", "--warmup", "2")
    done = det_ds(*words, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    assert "A step taken apart: 2 ranks on cpu, ZeRO 1; mean of 2 steps" in done.stdout
    assert not list((run_dir / "checkpoints").iterdir())
    names = sorted(path.name for path in (run_dir / "profile").iterdir())
    pictures = ["memory.png", "operators.png"]
    assert names == [*pictures, "profile.json", "profile.png", "rank0.json.gz", "rank1.json.gz"]
    assert "transformer.h.*.mlp" in done.stdout
    assert "Memory of tensors on rank" in done.stdout
    found = json.loads((run_dir / "profile" / "profile.json").read_text())
    for rank in found["ranks"]:
        assert [step["batch"] for step in rank["steps"]] == [3, 4]
        for step in rank["steps"]:
            assert sum(step["seconds"].values()) == pytest.approx(step["clock_s"], rel=0.02)

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


def test_traces_that_cannot_be_written_beside_are_still_read(tmp_path: Path) -> None:
    written(tmp_path, [mark("data", 0, 10)], [(0, 100)])
    (tmp_path / "profile.json").mkdir()  # in its place
    done = det_ds("profile", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cannot be written to" in done.stderr
    assert "data" in done.stdout
