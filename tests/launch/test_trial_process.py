"""A run in processes of its own: what it says is read while it runs, and none of it is ever left behind."""

from __future__ import annotations

import json
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
from determined_ds.launch.trial_process import MAX_REASON, TrialProcess, reason_of
from determined_ds.protocol.run_dir import METRICS, OUTPUT
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


def test_it_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    """However that one ends: here it is killed, and can end nothing itself."""
    run_dir = tmp_path / "run"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT)
    try:
        output = run_dir / OUTPUT
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
    assert not (tmp_path / "run" / METRICS).exists()


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
    assert "as requested" in process.output()


def test_what_it_cannot_run_it_says(tmp_path: Path) -> None:
    """With the exit code of a configuration, and its own first error for a reason; again it says it again."""
    for _ in range(2):
        process = process_in(tmp_path, experiment(slots=2, batch=7))
        process.start()
        try:
            assert until(process.poll) == 2
        finally:
            process.kill()
        assert process.reason().startswith("hyperparameters.global_batch_size = 7 (")
        assert process.output().count("error: ") == 1
        assert not process.ran_out_of_memory()


# --------------------------------------------------------------------------------------------- what it says


def line(step: int) -> str:
    return json.dumps({"group": "training", "steps_completed": step, "metrics": {}}) + "\n"


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    process = process_in(tmp_path)
    assert process.new_metrics() == []
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / METRICS
    with metrics.open("w") as file:

        def read_after(text: str) -> list[int]:
            file.write(text)
            file.flush()
            return [record["steps_completed"] for record in process.new_metrics()]

        assert read_after(line(1) + line(2)[:10]) == [1]
        assert read_after("") == []
        assert read_after(line(2)[10:]) == [2]
        assert read_after("{damaged\n" + line(3)) == [3]
        assert read_after("\n") == []


def test_what_was_forgotten_is_read_anew(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint drops what came after it, and trains it again."""
    process = process_in(tmp_path)
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / METRICS
    metrics.write_text(line(1) + line(2) + line(3))
    assert len(process.new_metrics()) == 3
    metrics.write_text(line(1))
    assert [record["steps_completed"] for record in process.new_metrics()] == [1]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", ""),
        (
            "tiny: trial:Tiny\nerror: --slots = 0: must be 1\n  fix: --slots 1\nerror: another\n",
            "--slots = 0: must be 1",
        ),
        (
            "Traceback (most recent call last):\n  File\nValueError: no such file\n",
            "ValueError: no such file",
        ),
        (
            "RuntimeError: first\nTraceback\ntorch.cuda.OutOfMemoryError: CUDA out of memory\n",
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
        ),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        (
            "rank 1 failed first:\n\nMine.loss (trial.py:9): returned None; expected a tensor\n  fix: return it\n\n"
            "what the other ranks wrote is in run/logs\n",
            "Mine.loss (trial.py:9): returned None; expected a tensor",
        ),
        (
            "rank 0 failed first:\n\nTraceback (most recent call last):\n  File\nValueError: odd\n\n"
            "full traceback: run/logs/traceback-rank0.txt\n",
            "ValueError: odd",
        ),
        (
            "training\nit ended without a word (exitcode: -9)\nmore\n",
            "it ended without a word (exitcode: -9)",
        ),
        ("training  batch 3\nSegmentation fault\n\n", "Segmentation fault"),
        ("Error: that is no error\nerror: but this is\n", "but this is"),
        ("error: " + 1000 * "x", (MAX_REASON - 3) * "x" + "..."),
    ],
)
def test_the_reason_is_in_its_own_words(output: str, reason: str) -> None:
    assert reason_of(output) == reason


@pytest.mark.parametrize(
    ("said", "is_memory"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory", True),
        ("MemoryError", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("std::bad_alloc", True),
        ("rank 1 failed first: Signal 9 (SIGKILL)", True),
        ("ValueError: no such file", False),
        ("", False),
    ],
)
def test_a_want_of_memory_is_known_by_its_words(said: str, is_memory: bool, tmp_path: Path) -> None:
    process = process_in(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / OUTPUT).write_text(said)
    assert process.ran_out_of_memory() == is_memory
