"""``det-ds profile``: a run that records, its parts, and traces from elsewhere."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from determined_ds.protocol.recorded_step import read_step
from tests.command import det_ds
from tests.profile.written_trace import mark, written

SMALL = ("--set", "hyperparameters.global_batch_size=8", "--set", "hyperparameters.sequence_length=32")
WITHIN = 0.02


def recorded(config: str, run_dir: Path, *options: str) -> dict[str, Any]:
    """``profile.json`` of two steps after two, whose parts add up to the loop's own clock."""
    done = det_ds("profile", config, ".", *options, "--steps", "2", "--warmup", "2", "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    assert "A step taken apart: " in done.stdout
    assert "The operators that cost most" in done.stdout
    assert "Memory of tensors on rank" in done.stdout
    assert not list((run_dir / "checkpoints").iterdir())
    found: dict[str, Any] = json.loads((run_dir / "profile" / "profile.json").read_text())
    assert [rank["rank"] for rank in found["ranks"]] == list(range(found["num_ranks"]))
    for rank in found["ranks"]:
        assert [step["batch"] for step in rank["steps"]] == [3, 4]
    steps = [step for rank in found["ranks"] for step in rank["steps"]]
    ratios = [sum(step["seconds"].values()) / step["clock_s"] for step in steps]
    assert statistics.median(ratios) == pytest.approx(1, abs=WITHIN)  # a rank may be put off between the two
    return found


def test_a_pipeline_is_recorded_without_checkpoints_and_its_step_taken_apart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    found = recorded("experiments/gpt2/pipeline.yaml", run_dir, *SMALL)
    assert found["pipe_parallel_size"] == 2
    assert [rank["pipe_stage"] for rank in found["ranks"]] == [0, 1]
    assert all(found["seconds"][part] for part in ("data", "forward", "backward", "pipeline", "optimizer"))
    names = sorted(path.name for path in (run_dir / "profile").iterdir())
    pictures = ["memory.png", "operators.png"]
    traces = ["rank0.json.gz", "rank1.json.gz"]
    assert names == [*pictures, "profile.json", "profile.png", *traces, "schedule.png"]
    step = read_step(run_dir / "pipeline_step.json")
    assert (step.schedule, step.ranks, step.micro_batches) == ("1f1b", 2, 8)

    moved = tmp_path / "brought"
    shutil.copytree(run_dir / "profile", moved)
    shown = det_ds("profile", moved)
    assert "*.mlp.c_fc (2 modules)" in shown.stdout
    again = det_ds("profile", moved, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["step_s"] == found["step_s"]


@pytest.mark.long("runtime/profiling/test_capture.py has smaller models, and a pipeline is above")
@pytest.mark.parametrize("slots", ["1", "2"])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        *(("experiments/gpt2/const.yaml", (f"hyperparameters.zero_stage={stage}",)) for stage in range(4)),
        ("experiments/gpt2/zero3_offload.yaml", ()),
        ("experiments/vit/const.yaml", ()),
        ("experiments/hf_trainer/const.yaml", ()),
    ],
)
def test_parts_add_up_to_the_step(config: str, options: tuple[str, ...], slots: str, tmp_path: Path) -> None:
    words = [word for option in options for word in ("--set", option)]
    found = recorded(config, tmp_path, *words, "--slots", slots)
    assert all(found["seconds"][part] for part in ("data", "forward", "backward", "optimizer"))
    assert (found["seconds"]["communication"] > 0) >= (slots == "2")


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    done = det_ds("profile", tmp_path)
    assert done.returncode == 2
    assert "holds no traces" in done.stderr
    assert "fix: record some" in done.stderr


def test_under_another_launcher_it_is_refused(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    env = {
        **dict.fromkeys(names, "0"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"), "1")
    done = det_ds("profile", "experiments/gpt2/const.yaml", ".", "--run-dir", tmp_path / "run", env=env)
    assert done.returncode == 2, done.stderr
    assert "torchrun has started this process as one" in done.stderr
    assert not (tmp_path / "run").exists()


def test_traces_that_cannot_be_written_beside_are_still_read(tmp_path: Path) -> None:
    written(tmp_path, [mark("data", 0, 10)], [(0, 100)])
    (tmp_path / "profile.json").mkdir()  # in its place
    done = det_ds("profile", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cannot be written to" in done.stderr
    assert "data" in done.stdout
