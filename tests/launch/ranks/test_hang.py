"""A hang is told: which rank, where, and how to go on; whatever takes its time with reason is none."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from determined_ds.launch.ranks import hang as module
from determined_ds.launch.ranks.group import Ranks
from determined_ds.launch.ranks.hang import Hang, HangWatch
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.handed_on import HANG_TIMEOUT
from determined_ds.protocol.heartbeat import HEARTBEATS, Heartbeat, make_heartbeats
from tests.command import det_ds
from tests.launch.test_trial_process import EXPERIMENT, TRIAL

# Rank 1 falls asleep in its third batch; rank 0 waits for it to add up gradients.
STUCK = """
class Stuck(Endless):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == 2 and self.context.distributed.rank == 1:
            fall_asleep()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

def fall_asleep():
    while True:
        signal.pause()
"""


def test_the_rank_that_hangs_is_named_with_its_stack_and_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(TRIAL + STUCK)
    config = tmp_path / "stuck.yaml"
    stated = f"environment: {{environment_variables: [{HANG_TIMEOUT}=0.05]}}\n"
    config.write_text(EXPERIMENT.format(trial="Stuck", slots=2, batch=8) + stated)
    run_dir = tmp_path / "run"
    period = "hyperparameters.fit.checkpoint_period={batches: 1}"
    done = det_ds(*("run", config, tmp_path, "--run-dir", run_dir, "--set", period), env={HANG_TIMEOUT: "60"})
    assert done.returncode == 1, done.stderr
    assert (
        f"rank 1 hangs: nothing has moved for 3 s, since batch 2; its stack is in {run_dir}/logs/rank1.log"
        in (done.stderr)
    )
    assert "in fall_asleep" in done.stderr.splitlines()[3]
    assert "in fall_asleep" in (run_dir / "logs" / "rank1.log").read_text()
    assert "torch/distributed/" in (run_dir / "logs" / "rank0.log").read_text()
    newest = checkpoints_in(run_dir / "checkpoints")[0]
    assert newest.steps_completed == 2
    assert f"the last checkpoint is {newest.path}" in done.stderr
    assert f"--run-dir {run_dir} --resume" in done.stderr
    assert "Traceback" not in done.stderr


# By Determined's Core API: rank 0 alone reports.
SCRIPT = """
import signal
import determined as det
import torch.distributed as dist
import torch

def fall_asleep():
    while True:
        signal.pause()

dist.init_process_group("gloo")
with det.core.init(distributed=det.core.DistributedContext.from_torch_distributed()) as context:
    for step in range(1, 9):
        if step == 4 and dist.get_rank() == 1:
            fall_asleep()
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 0:
            context.train.report_training_metrics(step, {"loss": 1.0})
"""


def test_a_script_that_stops_reporting_is_ended_where_a_limit_is_stated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    config = tmp_path / "script.yaml"
    config.write_text("name: script\nentrypoint: python3 train.py\nresources: {slots_per_trial: 2}\n")
    done = det_ds("run", config, tmp_path, "--run-dir", tmp_path / "run", "--hang-timeout", "0.05")
    assert done.returncode == 1, done.stderr
    assert "hangs      ended 3 s after its last step or report; not before the first one" in done.stdout
    assert "rank 1 hangs: nothing has moved for 3 s, since batch 3" in done.stderr
    assert "in fall_asleep" in done.stderr


WAITING = """Thread 0x1 (most recent call first):
  File "/lib/threading.py", line 3 in wait

Current thread 0x2 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce
  File "/site-packages/deepspeed/runtime/engine.py", line 3 in step
  File "/me/trial.py", line 3 in train_batch
"""
BUSY = """Current thread 0x2 (most recent call first):
  File "/me/trial.py", line 7 in fall_asleep
  File "/me/trial.py", line 3 in train_batch
"""


class Stage:
    """A watch over two ranks that are played here, on a clock of its own; looks are a tenth of a second apart."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 10.0) -> None:
        self.heartbeats = folder / "heartbeats"
        self.logs = [folder / "rank0.log", folder / "rank1.log"]
        self.pids = [os.getpid()]
        self.stacks = ["", ""]
        self.ended = False
        self.now_s = 100.0
        make_heartbeats(self.heartbeats, 2)
        monkeypatch.setenv(HEARTBEATS, str(self.heartbeats))
        self.hearts = [Heartbeat(), Heartbeat()]
        for rank, heart in enumerate(self.hearts):
            monkeypatch.setenv("RANK", str(rank))
            heart.listen_for_questions(self.logs[rank])
        faulthandler.unregister(signal.SIGUSR1)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.passes)
        monkeypatch.setattr(module, "time", clock)  # of this room alone: other threads keep the real one
        self.watch = HangWatch(cast(Ranks, self), timeout_s)

    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    def look_for(self, seconds: float) -> Hang | None:
        for _ in range(round(10 * seconds)):
            self.passes(0.1)
            self.watch.look()
        return self.watch.hang

    def send(self, number: signal.Signals) -> None:
        assert number == signal.SIGUSR1
        for log, stack in zip(self.logs, self.stacks, strict=True):
            log.write_text(stack)

    def kill(self) -> None:
        self.ended = True


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def test_the_rank_that_does_not_wait_for_another_is_behind(stage: Stage) -> None:
    stage.stacks = [WAITING, BUSY]
    for heart in stage.hearts:
        heart.step(4)
    assert stage.look_for(9.9) is None
    stack = '  File "/me/trial.py", line 7 in fall_asleep\n  File "/me/trial.py", line 3 in train_batch'
    assert stage.look_for(1) == Hang(seconds=10, steps=4, behind=(1,), stack=stack)
    assert stage.ended


def test_the_rank_with_the_fewest_batches_is_behind(stage: Stage) -> None:
    """Whatever it seems to do."""
    stage.stacks = [BUSY, WAITING]
    stage.hearts[0].step(5)
    stage.hearts[1].step(4)
    hang = stage.look_for(11)
    assert hang is not None
    assert (hang.behind, hang.steps) == ((1,), 4)


def test_a_rank_that_counts_no_batches_is_judged_by_what_it_does(stage: Stage) -> None:
    """Of a script, rank 0 alone reports."""
    stage.stacks = [BUSY, WAITING]
    stage.hearts[0].step(4)
    hang = stage.look_for(11)
    assert hang is not None
    assert (hang.behind, hang.steps) == ((0,), 4)


@pytest.mark.parametrize("stacks", [["", ""], [WAITING, WAITING]], ids=["no answer", "all wait"])
def test_where_nothing_tells_them_apart_all_of_them_hang(stage: Stage, stacks: list[str]) -> None:
    stage.stacks = stacks
    for heart in stage.hearts:
        heart.step(1)
    hang = stage.look_for(11)
    assert hang is not None
    assert hang.behind == (0, 1)


def test_before_the_first_step_data_are_prepared_and_models_compiled(stage: Stage) -> None:
    stage.hearts[0].beat()
    assert stage.look_for(1000) is None


def test_any_progress_counts(stage: Stage) -> None:
    stage.hearts[0].step(1)
    for _ in range(5):
        assert stage.look_for(9) is None
        stage.hearts[1].step(1)
        stage.hearts[1].beat()
    assert stage.look_for(11) is not None


def test_a_users_own_work_takes_as_long_as_it_takes(stage: Stage) -> None:
    stage.hearts[0].step(1)
    with stage.hearts[1].patiently():
        assert stage.look_for(1000) is None
    assert stage.look_for(9) is None
    stage.hearts[0].rest()  # training is over
    assert stage.look_for(1000) is None


def test_a_machine_that_sleeps_and_a_launcher_that_is_held_are_no_hang(stage: Stage) -> None:
    stage.hearts[0].step(1)
    assert stage.look_for(5) is None
    stage.passes(3600)
    assert stage.look_for(3) is None
    assert stage.look_for(3) is not None


def test_a_rank_in_a_debugger_is_waited_for(stage: Stage) -> None:
    held = subprocess.Popen(["sleep", "600"])
    try:
        held.send_signal(signal.SIGSTOP)
        os.waitpid(held.pid, os.WUNTRACED)
        stage.pids = [os.getpid(), held.pid]
        stage.hearts[0].step(1)
        assert stage.look_for(100) is None
        held.send_signal(signal.SIGCONT)
        os.waitpid(held.pid, os.WCONTINUED)
        assert stage.look_for(11) is not None
    finally:
        held.kill()
        held.wait()


def test_the_watch_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(tmp_path, monkeypatch, timeout_s=0)
    stage.hearts[0].step(1)
    assert stage.look_for(1000) is None
