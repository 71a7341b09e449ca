"""A disk that is full is said in one message with its fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.harness.command import det_ds
from tests.package import checkpoints, damage
from tests.rundir.runs import words

EACH_BATCH = {"checkpoint_period": {"batches": 1}, "checkpoint_policy": "all"}


def test_a_checkpoint_that_does_not_fit_leaves_nothing(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    """The ones before it are whole."""
    run_dir = small_disk(2**20) / "run"
    done = det_ds(*words(tmp_path, run_dir, fit=EACH_BATCH))
    kept = checkpoints(run_dir)
    assert len(kept) >= 2
    assert done.returncode == 1, done.stderr
    assert f"no space left on the disk of {run_dir.parent}" in done.stderr
    assert "fix: free some space" in done.stderr
    assert "Traceback" not in done.stderr
    assert "restart" not in done.stderr
    assert [damage(checkpoint) for checkpoint in kept] == [None] * len(kept)
    assert list((run_dir / "checkpoints").glob(".*")) == []


def test_metrics_that_do_not_fit_end_the_run(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    """Outside a checkpoint, in the thread that trains or in another one: one message, and no traceback."""
    run_dir = small_disk(192 * 1024) / "run"
    done = det_ds(*words(tmp_path, run_dir))
    assert done.returncode == 1, done.stderr
    assert "no space left on the disk of" in done.stderr
    assert "Traceback" not in done.stderr
