"""What runs out is said in one message: what, where, how much there is, the last checkpoint, and the fix."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.command import DET_DS, ROOT, det_ds
from tests.package import checkpoints, damage
from tests.rundir.runs import words

EACH_BATCH = {"checkpoint_period": {"batches": 1}, "checkpoint_policy": "all"}


def check_told(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """It failed, and ends with an error of two lines; nothing else is a traceback."""
    assert done.returncode == 1, done.stderr
    error, fix = done.stderr.rstrip().splitlines()[-2:]
    assert error.startswith("error: "), done.stderr
    assert fix.startswith("  fix: ")
    for each in said:
        assert each in error
    assert "Traceback" not in done.stderr, done.stderr


def test_a_checkpoint_that_does_not_fit_leaves_nothing(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    """The ones before it are whole."""
    run_dir = small_disk(2**20) / "run"
    done = det_ds(*words(tmp_path, run_dir, fit=EACH_BATCH))
    kept = checkpoints(run_dir)
    assert len(kept) >= 2
    check_told(done, f"no space left on the disk of {run_dir}", "of 1 MiB are free")
    check_told(done, f"the last checkpoint is {kept[0]}")
    assert [damage(checkpoint) for checkpoint in kept] == [None] * len(kept)
    assert list((run_dir / "checkpoints").glob(".*")) == []


def test_a_disk_that_fills_up(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    run_dir = small_disk(2**20) / "run"
    done = det_ds(*words(tmp_path, run_dir, "Filling"), env={"FILL": str(run_dir.parent)})
    check_told(done, f"no space left on the disk of {run_dir}", "of 1 MiB are free")
    assert (run_dir / "experiment.yaml").stat().st_size > 0


def test_a_disk_that_is_full_before_the_start(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64 * 1024)
    (disk / "filler").write_bytes(bytes(64 * 1024))
    done = det_ds(*words(tmp_path, disk / "run"))
    assert done.returncode == 2
    assert "cannot be written to: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long("a disk that is full is short")
def test_a_reader_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    """A closed terminal, ``| head``: what would be written is dropped."""
    given = words(tmp_path, tmp_path / "run", fit={"max_length": {"batches": 30}})
    with subprocess.Popen(
        [str(DET_DS), *given, "--accelerator", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 30
