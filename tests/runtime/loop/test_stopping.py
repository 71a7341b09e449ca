"""Stopping: at the user's request, at a loss that is not finite, and because a rank has died."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from determined.pytorch import Batch

from determined_ds.protocol.checkpoint_files import checkpoints_in, damage_of
from determined_ds.runtime.loop import stopping
from determined_ds.runtime.loop.reporting import engine_metrics
from tests.command import ROOT, Started
from tests.runtime.test_resume import experiment, run
from tests.runtime.victim import differences, last_words


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
    assert process.processes() == []
    return code, "".join(seen)


def steps_of(run_dir: Path) -> list[int]:
    return sorted(checkpoint.steps_completed for checkpoint in checkpoints_in(run_dir / "checkpoints"))


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
    stopped_at = steps_of(tmp_path / "run")[-1]
    end = f"hyperparameters.fit.max_length.batches={stopped_at + 3}"
    resumed = run(config, tmp_path / "run", "--resume", "--set", end)
    assert resumed.returncode == 0, resumed.stderr
    whole = run(config, tmp_path / "whole", "--set", end)
    assert whole.returncode == 0, whole.stderr
    assert steps_of(tmp_path / "run")[-1] == stopped_at + 3
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
    held.write_text(config.read_text().replace("victim:Victim", "victim:HeldVictim"))
    code, output = run_until(held, tmp_path / "run", "holding", send_twice)
    assert code == 128 + signal.SIGTERM, output
    assert steps_of(tmp_path / "run") == []


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_last_good_checkpoint(
    config: Path, tmp_path: Path
) -> None:
    """Named are the batch and the rank; batch 7 is between two reports."""
    failed = run(config, tmp_path / "run", NAN_AT="1:7")
    assert failed.returncode == 1
    assert "not finite at batch 7, on rank 1" in failed.stderr
    assert steps_of(tmp_path / "run") == [3, 5, 6]
    last = checkpoints_in(tmp_path / "run" / "checkpoints")[0]
    assert damage_of(last.path) is None
    assert last.uuid in failed.stderr


def test_stop_on_nan_can_be_turned_off(config: Path, tmp_path: Path) -> None:
    """The metric is then reported for what it is, in JSON that every reader takes."""
    done = run(config, tmp_path / "run", "--set", "hyperparameters.fit.stop_on_nan=false", NAN_AT="1:7")
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["metrics"]["loss"] for r in records if r["group"] == "training"][1] == "NaN"


def test_workers_that_end_with_a_failed_rank_are_no_failure_of_their_own(
    config: Path, tmp_path: Path
) -> None:
    """Torch's launcher ends all that the other ranks have started, which they may be closing just then."""
    config.write_text(config.read_text().replace("victim:Victim", "victim:VictimWithWorker"))
    failed = run(config, tmp_path / "run", "--slots", "1")
    assert failed.returncode == 1
    assert "a loss that cannot be" in failed.stderr
    assert "killed by signal" not in failed.stderr


class Stage:
    """What ``StopRequests`` looks at: a context of one rank, and the chief's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.asked_at_s: list[float] = []
        self.distributed = SimpleNamespace(rank=0, size=1)
        self.device = torch.device("cpu")
        self._core = SimpleNamespace(preempt=self)
        monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def should_preempt(self) -> bool:
        self.asked_at_s.append(self.now_s)
        return False

    def get_stop_requested(self) -> bool:
        return False


@pytest.mark.parametrize("batch_s", [0.001, 0.05, 0.9, 4.0, 30.0])
def test_preemption_is_asked_for_often_enough_whatever_the_periods(
    monkeypatch: pytest.MonkeyPatch, batch_s: float
) -> None:
    """At least every five seconds, or every batch where one takes longer; and not at every short batch."""
    stage = Stage(monkeypatch)
    stops = stopping.StopRequests(stage)
    stops.start(0)
    num_batches = max(20, int(30 / batch_s))
    for batch in range(1, num_batches + 1):
        stage.now_s += batch_s
        if stops.due(batch):
            stops.ask(batch)
    gaps = [b - a for a, b in itertools.pairwise(stage.asked_at_s)]
    assert max(gaps) <= max(stopping.ASK_EVERY_S, batch_s) + 1e-9
    assert len(stage.asked_at_s) <= max(num_batches, 40)
    if batch_s < 0.1:
        assert len(stage.asked_at_s) < num_batches / 10


@pytest.mark.parametrize("period_s", [0.01, 1.0, 60.0, 900.0])
@pytest.mark.parametrize("batch_s", [0.004, 0.05, 0.9, 30.0, 1200.0])
def test_a_checkpoint_by_the_clock_is_due_at_the_first_batch_after_its_time(
    monkeypatch: pytest.MonkeyPatch, batch_s: float, period_s: float
) -> None:
    """With batches that take equally long; a checkpoint takes as long as two of them, and does not count."""
    stage = Stage(monkeypatch)
    clock = stopping.CheckpointClock(timedelta(seconds=period_s))
    stops = stopping.StopRequests(stage, clock)
    stops.start(0)
    last, late = stage.now_s, []
    for batch in range(1, max(20, int(3 * period_s / batch_s)) + 1):
        stage.now_s += batch_s
        if stops.due(batch):
            stops.ask(batch)
        if stops.checkpoint_due:
            late.append(stage.now_s - last - period_s)
            stage.now_s += 2 * batch_s
            clock.restart()
            last = stage.now_s
            stops.ask(batch)  # as after every checkpoint
    assert late
    assert all(-1e-9 <= each <= batch_s + 1e-9 for each in late)


def test_the_clock_of_the_chief_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stage.distributed.rank = 1
    other = stopping.StopRequests(stage, stopping.CheckpointClock(timedelta(seconds=1)))
    stage.now_s += 2
    assert other.vote(1).tolist() == [0, 0, 0, 1]
    other.count([0, 5, 1, 1], 1)
    assert other.checkpoint_due
    assert [other.due(batch) for batch in (5, 6)] == [False, True]


def test_no_clock_without_a_period_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    stops = stopping.StopRequests(stage, stopping.CheckpointClock(Batch(3)))
    stage.now_s += 1e9
    stops.ask(1)
    assert not stops.checkpoint_due


def test_steps_skipped_for_overflow_are_reported() -> None:
    """An engine in fp16 stands in: no CPU here trains in it."""
    engine = SimpleNamespace(
        optimizer=object(),
        _get_optimizer_loss_scale=lambda: 4096.0,
        skipped_steps=3,
        get_lr=lambda: [0.5],
        get_global_grad_norm=lambda: float("inf"),
        fp16_enabled=lambda: True,
    )
    assert engine_metrics(engine) == {"lr": 0.5, "loss_scale": 4096.0, "skipped_steps": 3}
