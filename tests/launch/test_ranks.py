"""The processes of a run: a rank that hangs is named, ranks listen to this machine alone, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness.command import ROOT, TIMEOUT_S, Started, det_ds
from tests.package import checkpoints
from tests.rundir.runs import until, words

LIMIT = "environment.environment_variables=[DETERMINED_DS_HANG_TIMEOUT=0.05]"  # minutes


# One whose rank 1 falls asleep in a batch, where rank 0 waits for it to add up gradients; one that leaves; one that
# takes its time; one that is killed; and one that is stopped while it prepares its data.
SOURCE = """
import signal, subprocess, sys, time

def fall_asleep():
    while True:
        signal.pause()

class Stuck(Plain):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == int(os.environ["STUCK_IN"]) and self.context.distributed.rank == 1:
            fall_asleep()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

class Leaving(Plain):
    def loss(self, model, batch):
        os._exit(0)

class Slow(Plain):
    # Longer than the limit: a compiler before the first batch, a validation of the user's own, and an upload.
    def __init__(self, context):
        super().__init__(context)
        manager = context._core.checkpoint._storage_manager  # Determined's
        store = manager.post_store_path
        manager.post_store_path = lambda *given, **more: (time.sleep(4), store(*given, **more))[1]
    def prepare(self):
        compiles = "import time; until = time.monotonic() + 6\\nwhile time.monotonic() < until: pass"
        subprocess.run([sys.executable, "-c", compiles], check=True)
    def evaluate_full_dataset(self, data_loader):
        time.sleep(4)
        return {"validation_loss": 0.0}

class Held(Plain):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        print("holding", flush=True)
        fall_asleep()

class Killed(Plain):
    def loss(self, model, batch):
        os.kill(os.getpid(), signal.SIGKILL)

class Early(Plain):
    def prepare(self):
        if self.context.distributed.rank == 0:
            os.kill(int(os.environ["DET_DS_PARENT"]), signal.SIGTERM)
            time.sleep(1)
"""


def written(folder: Path, trial: str, slots: int = 2, **fit: Any) -> list[str]:
    """The words of a run that never ends."""
    return words(folder, folder / "run", trial, slots=slots, fit=fit, source=SOURCE)


# ------------------------------------------------------------------------------------------- a rank that hangs


@pytest.mark.parametrize(("batch", "since"), [(2, "since batch 2"), (0, "before the first batch")])
def test_the_rank_that_hangs_is_named_with_every_stack(batch: int, since: str, tmp_path: Path) -> None:
    given = written(tmp_path, "Stuck", checkpoint_period={"batches": 1})
    done = det_ds(*given, "--set", LIMIT, env={"DETERMINED_DS_HANG_TIMEOUT": "60", "STUCK_IN": str(batch)})
    assert done.returncode == 1, done.stderr
    said, hanging, of_others = done.stderr.partition("rank 1 stands here, innermost call first:\n")
    assert "rank 1 hangs: nothing has moved for 3 s, " in said
    assert since in said
    assert hanging
    assert of_others.splitlines()[0].endswith("in fall_asleep")
    assert "torch/distributed/" in of_others.partition("rank 0 stands here, innermost call first:\n")[2]
    assert "Traceback" not in done.stderr
    assert bool(checkpoints(tmp_path / "run")) == bool(batch)
    assert (f"--run-dir {tmp_path / 'run'} --resume" in done.stdout) == bool(batch)


@pytest.mark.long("real waiting; a rank that hangs is short")
def test_what_takes_its_time_with_reason_is_no_hang(tmp_path: Path) -> None:
    periods = {"max_length": {"batches": 2}, "validation_period": {"batches": 1}}
    done = det_ds(*written(tmp_path, "Slow", slots=1, **periods), "--set", LIMIT)
    assert done.returncode == 0, done.stderr
    assert "hangs: " not in done.stderr


def test_a_rank_that_leaves_without_a_word_has_not_completed(tmp_path: Path) -> None:
    done = det_ds(*written(tmp_path, "Leaving", slots=1))
    assert done.returncode == 1, done.stdout
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "failed"


def test_a_killed_rank_of_another_launcher_is_named_with_its_signal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m"]
    command += ["determined_ds.cli", *written(tmp_path, "Killed", slots=1), "--accelerator", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "rank 0 was killed by SIGKILL; the system kills processes when memory runs out" in done.stderr


# ------------------------------------------------------------------------------------------- processes


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Started]:
    """A run of two ranks that trains for ever."""
    process = Started(*written(tmp_path, "Plain"), merged=True)
    metrics = tmp_path / "run/metrics.jsonl"
    until(lambda: (metrics.is_file() and metrics.read_text()) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    yield process
    process.close()


def listening(process: psutil.Process) -> list[str]:
    sockets = process.net_connections(kind="inet")
    return [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN or not each.raddr]


def test_no_port_of_a_run_is_open_to_other_machines_and_killed_it_leaves_no_process(
    training: Started,
) -> None:
    """Of any of its processes; torch's own launcher and its store bind every interface."""
    launcher = psutil.Process(training.pid)
    ranks = launcher.children(recursive=True)
    assert len(ranks) >= 2
    assert listening(launcher) == [], "the launcher listens to nobody: nothing that it reads came by a port"
    addresses = {address for each in ranks for address in listening(each)}
    assert addresses, "ranks listen for one another"
    assert addresses <= {"127.0.0.1", "::1"}
    os.kill(training.pid, signal.SIGKILL)  # it can end nothing itself
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks))


def test_a_run_that_is_stopped_while_it_starts_trains_nothing(tmp_path: Path) -> None:
    done = det_ds(*written(tmp_path, "Early"))
    assert done.returncode == 0, done.stderr
    assert "stopped     batch 0 of 1000000, as requested" in done.stdout
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["steps_completed"]) == ("stopped", 0)
    assert checkpoints(tmp_path / "run") == []


def test_the_first_signal_finishes_the_batch_and_the_second_ends_it_at_once(tmp_path: Path) -> None:
    process = Started(*written(tmp_path, "Held"), merged=True)
    logs = tmp_path / "run/logs"
    until(lambda: any("holding" in log.read_text() for log in logs.glob("rank*.log")) or process.poll())
    process.send_signal(signal.SIGTERM)
    until(lambda: "SIGTERM" in process.stdout.readline())
    assert process.poll() is None, "its batch never ends"
    process.send_signal(signal.SIGTERM)
    process.communicate(60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not process.processes()
