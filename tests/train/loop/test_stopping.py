"""Stopping: at the user's request, and at a loss that is not finite."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.harness.command import ROOT, Started
from tests.interrupted.experiments import experiment, run
from tests.package import checkpoints, damage, records
from tests.train.small import saved_steps


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "victim.yaml"
    path.write_text(yaml.safe_dump(experiment(zero=1)))
    return path


def test_ctrl_c_in_a_terminal_ends_the_run_with_a_checkpoint(config: Path, tmp_path: Path) -> None:
    """The signal goes to the whole process group. The second one: ``tests/launch/test_ranks.py``."""
    longer = "hyperparameters.fit.max_length.batches=1000000"
    process = Started("run", config, ROOT, "--run-dir", tmp_path / "run", "--set", longer, merged=True)
    while "batch       4/" not in (line := process.stdout.readline()):
        assert line
    os.killpg(process.pid, signal.SIGINT)
    output = process.stdout.read()
    assert process.wait() == 0, output
    assert not process.processes()
    assert "resume      det-ds run" in output
    assert saved_steps(tmp_path / "run")[-1] >= 4


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_good_checkpoint(
    config: Path, tmp_path: Path
) -> None:
    """Named are the batch and the rank; batch 7 is between two reports. Turned off, it is reported for what it is."""
    failed = run(config, tmp_path / "run", NAN_AT="1:7")
    assert failed.returncode == 1
    assert "not finite at batch 7, on rank 1" in failed.stderr
    assert saved_steps(tmp_path / "run") == [3, 5, 6]
    last, *_ = checkpoints(tmp_path / "run")
    assert damage(last) is None
    assert last.name in failed.stderr
    done = run(config, tmp_path / "on", "--set", "hyperparameters.fit.stop_on_nan=false", NAN_AT="1:7")
    assert done.returncode == 0, done.stderr
    assert records(tmp_path / "on", "training")[1][1]["loss"] == "NaN"
