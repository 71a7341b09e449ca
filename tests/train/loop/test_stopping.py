"""Stopping: at the user's request, at a loss that is not finite, and because a rank has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.harness.command import ROOT, Started
from tests.interrupted.compared import differences, last_words
from tests.interrupted.experiments import experiment, run
from tests.package import checkpoints, damage, records
from tests.train.small import saved_steps


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "victim.yaml"
    path.write_text(yaml.safe_dump(experiment(zero=1)))
    return path


def run_until(config: Path, run_dir: Path, word: str, then: Callable[[Started], None]) -> tuple[int, str]:
    """Start a run that would take for ever, do something when its output has a word, and see how it ends."""
    longer = "hyperparameters.fit.max_length.batches=1000000"
    words = ("run", config, ROOT, "--run-dir", run_dir, "--set", longer)
    process = Started(*words, merged=True)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if word in line:
            then(process)
            break
    seen.append(process.stdout.read())
    code = process.wait()
    assert not process.processes()
    return code, "".join(seen)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_checkpoints_and_the_run_can_be_resumed(
    config: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """To the whole process group, as a terminal's Ctrl-C goes; then on to where an uninterrupted run ends."""

    def send(process: Started) -> None:
        os.killpg(process.pid, number)

    code, output = run_until(config, tmp_path / "run", "batch       4/", send)
    assert code == 0, output
    assert "resume      det-ds run" in output
    stopped_at = saved_steps(tmp_path / "run")[-1]
    end = f"hyperparameters.fit.max_length.batches={stopped_at + 3}"
    resumed = run(config, tmp_path / "run", "--resume", "--set", end)
    assert resumed.returncode == 0, resumed.stderr
    whole = run(config, tmp_path / "whole", "--set", end)
    assert whole.returncode == 0, whole.stderr
    assert saved_steps(tmp_path / "run")[-1] == stopped_at + 3
    left, right = last_words(tmp_path / "run"), last_words(tmp_path / "whole")
    assert differences(left["states"], right["states"]) == []
    # The stopped run had a longer way to go: only where it ended does the other one report of itself.
    assert left["metrics"][-1] == right["metrics"][-1]


def test_the_second_signal_stops_at_once(config: Path, tmp_path: Path) -> None:
    def send_twice(process: Started) -> None:
        process.send_signal(signal.SIGTERM)
        for line in process.stdout:
            if "stopping after this batch" in line:
                break
        process.send_signal(signal.SIGTERM)

    # A trial that holds each batch until it is killed: there is no time in which the first signal could be enough.
    held = tmp_path / "held.yaml"
    held.write_text(config.read_text().replace("trials:Victim", "trials:HeldVictim"))
    code, output = run_until(held, tmp_path / "run", "holding", send_twice)
    assert code == 128 + signal.SIGTERM, output
    assert saved_steps(tmp_path / "run") == []


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
