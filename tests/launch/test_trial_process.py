"""A run in processes of its own: it is followed while it runs, says how it ended, and is never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.launch.trial_process import TrialProcess
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.run_dir import RunDir
from tests.command import ROOT, TIMEOUT_S, processes_of

# One that trains for ever, and one that never ends its first batch.
TRIAL = """
import signal
import torch
from determined_ds import DataParallelTrial

class Endless(DataParallelTrial):
    def build_model(self):
        return torch.nn.Linear(4, 1)
    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)
    def build_training_data_loader(self):
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs[:, :1]))
    build_validation_data_loader = build_training_data_loader

class Held(Endless):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        print("holding", flush=True)
        while True:
            signal.pause()
"""
EXPERIMENT = """
name: endless
entrypoint: python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:{trial}
resources: {{slots_per_trial: {slots}}}
hyperparameters:
  global_batch_size: {batch}
  deepspeed_config: {{type: const, val: {{optimizer: {{type: AdamW, params: {{lr: 0.01}}}}}}}}
  fit: {{max_length: {{batches: 1000000}}, reporting_period: {{batches: 1}}, checkpoint_policy: none}}
searcher: {{name: single, metric: validation_loss}}
"""


def experiment(trial: str = "Endless", slots: int = 1, batch: int = 8) -> Document:
    return parse_yaml(EXPERIMENT.format(trial=trial, slots=slots, batch=batch), "experiment.yaml")


def process_in(folder: Path, given: Document | None = None, *arguments: str) -> TrialProcess:
    (folder / "trial.py").write_text(TRIAL)
    return TrialProcess(
        experiment=given or experiment(),
        context_dir=folder,
        run_dir=folder / "run",
        accelerator="cpu",
        arguments=arguments,
        environment={"OMP_NUM_THREADS": "1"},
    )


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is true, and hand it back; a guard against hangs, not a measure."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
    return found


# ---------------------------------------------------------------------------------------- nothing is left


@pytest.mark.programs
def test_killed_it_leaves_no_process_behind(tmp_path: Path) -> None:
    """Not even of its ranks; until then it reports, and what it reports is read once."""
    process = process_in(tmp_path, experiment(slots=2))
    process.start()
    try:
        records: list[dict[str, Any]] = []
        until(
            lambda: records.extend(process.new_metrics()) or len(records) >= 3 or process.poll() is not None
        )
        assert process.poll() is None, process.output()
        assert len(processes_of(tmp_path / "run")) >= 3
    finally:
        process.kill()
    assert process.poll() == 128 + signal.SIGKILL
    until(lambda: not processes_of(tmp_path / "run"))
    records += process.new_metrics()
    assert [each["steps_completed"] for each in records] == list(range(1, len(records) + 1))
    process.kill()  # again, which does nothing


PARENT = f"""
import signal, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.launch.test_trial_process import experiment, process_in
process_in(Path(sys.argv[1]), experiment("Held", slots=2)).start()
signal.pause()
"""


@pytest.mark.programs
def test_it_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """However that one ends: here it is killed, and can end nothing itself."""
    run_dir = tmp_path / "run"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT)
    try:
        output = RunDir(run_dir).output
        until(lambda: (output.is_file() and "holding" in output.read_text()) or parent.poll() is not None)
        assert len(processes_of(run_dir)) >= 3
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    until(lambda: not processes_of(run_dir))


def test_a_parent_that_is_gone_before_it_began_has_no_child(tmp_path: Path) -> None:
    """It is told who its parent should be, and has another."""
    process = process_in(tmp_path, None, "--parent", str(os.getpid() + 10**6))
    process.start()
    assert until(process.poll) == 128 + signal.SIGKILL
    assert not RunDir(tmp_path / "run").metrics.exists()
    assert (process.result().status, process.result().cause) == ("failed", "killed")


@pytest.mark.long("one more run; test_local_search stops its trials so")
def test_asked_to_stop_it_finishes_its_batch(tmp_path: Path) -> None:
    process = process_in(tmp_path)
    process.start()
    try:
        until(lambda: process.new_metrics() or process.poll() is not None)
        process.stop()
        assert until(lambda: process.poll() is not None)
        assert process.poll() == 0, process.output()
    finally:
        process.kill()
    result = process.result()
    assert (result.status, result.cause, result.reason) == ("stopped", None, None)
    assert result.resume
    assert result.resume.endswith("--resume --accelerator cpu")
    newest = checkpoints_in(tmp_path / "run/checkpoints")[0]
    assert result.checkpoint == {"uuid": newest.uuid, "steps_completed": result.steps_completed}


def test_what_it_cannot_run_it_says(tmp_path: Path) -> None:
    """With the exit code of a configuration, and its own first error for a reason; again it says it again."""
    for _ in range(2):
        process = process_in(tmp_path, experiment(slots=2, batch=7))
        process.start()
        try:
            assert until(process.poll) == 2
        finally:
            process.kill()
        result = process.result()
        assert (result.status, result.cause) == ("invalid", "configuration")
        assert (result.reason or "").startswith("hyperparameters.global_batch_size = 7 (")
        assert process.output().count("error: ") == 1
