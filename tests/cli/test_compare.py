"""``det-ds compare`` as it is typed: what it writes and says."""

from __future__ import annotations

import csv
from pathlib import Path

import psutil
import pytest

from determined_ds import compare, load_results
from tests.harness.command import det_ds

# ZeRO 3 finds no memory, once it trains.
GREEDY = """

class GreedyTrial(TinyTrial):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if self.resolved.zero_stage == 3:
            raise MemoryError("no room for it")
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
"""


def test_a_report_of_what_runs_and_what_does_not(
    own_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is measured, one runs out of memory, one cannot run; what else the machine does stands beside the result."""
    config, run_dir = own_model / "experiment.yaml", tmp_path / "compared"
    with (own_model / "trial.py").open("a") as file:
        file.write(GREEDY)
    config.write_text(config.read_text().replace("trial:TinyTrial", "trial:GreedyTrial"))
    options = ["--slots", "1", "--steps", "3", "--warmup", "1", "--repeat", "1", "--run-dir", run_dir]
    done = det_ds("compare", config, own_model, "--strategies", "zero0,zero3,zeropp", *options)
    assert done.returncode == 0, done.stderr
    measured, greedy_one, impossible = load_results(run_dir / "results.json").rows
    found = [row.status for row in (measured, greedy_one, impossible)]
    assert found == ["measured", "out of memory", "cannot run"]
    assert (len(measured.step_seconds), len(measured.losses), measured.slots) == (3, 4, 1)
    assert greedy_one.reason == "MemoryError: no room for it"
    assert "there is no CUDA device" in impossible.reason
    # AdamW on four weights and a bias, in fp32: parameters, gradients and two moments.
    assert measured.model_state_bytes == 16 * 5
    assert "out of memory: MemoryError: no room for it" in done.stdout
    with (run_dir / "results.csv").open() as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["zero0", "zero3", "zeropp"]
    assert "MemoryError: no room for it" in (run_dir / "report.html").read_text()

    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 60.0)  # of other programs
    again = {"strategies": ["zero0"], "slots": [1], "steps": 3, "warmup": 1, "repeat": 1}
    found = compare(config, own_model, **again, run_dir=run_dir, accelerator="cpu")
    told, load = capsys.readouterr().out, "other programs took up to 60% of its cores"
    assert f"warning: while it was measured, {load}: compare times by" in told
    assert load in found.machine
    assert found.rows[0].repetitions != measured.repetitions


EXPERIMENT = """
name: own
entrypoint: python3 -m determined.launch.torch_distributed python3 train.py
resources: {slots_per_trial: 2}
hyperparameters:
  global_batch_size: 8
  learning_rate: 0.1
  deepspeed_config: {type: const, val: {optimizer: {type: Adam}}}
searcher: {name: single, metric: loss}
"""
# Under ZeRO 3 it goes by another configuration than it is given.
SCRIPT = """
import deepspeed, torch
import determined_ds

with determined_ds.session() as s:
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    config = s.ds_config
    if config["zero_optimization"]["stage"] == 3:
        config = {**config, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = s.loader(samples)
    s.checkpoint(engine)
    while True:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
            s.report({"loss": loss})
"""


def test_strategies_of_a_script_are_measured_where_it_honours_them(tmp_path: Path) -> None:
    """A row's name is that of the engine's strategy: the script that makes another one has no numbers."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "own.yaml").write_text(EXPERIMENT)
    run_dir = tmp_path / "compared"
    options = ["--steps", "3", "--warmup", "1", "--repeat", "1", "--run-dir", run_dir]
    strategies = "zero2,zero3,pipeline,ddp"
    done = det_ds("compare", tmp_path / "own.yaml", tmp_path, "--strategies", strategies, *options)
    assert done.returncode == 0, done.stderr
    rows = load_results(run_dir / "results.json").rows
    assert [row.status for row in rows] == ["measured", "cannot run", "cannot run", "cannot run"]
    measured, other, piped, by_torch = rows
    assert (measured.slots, len(measured.step_seconds), measured.micro_batch_size) == (2, 3, 4)
    assert "makes an engine of ZeRO 1 in fp32; the configuration is ZeRO 3 in fp32" in other.reason
    assert "keeps the stages that its code builds" in piped.reason
    assert "makes its engine itself" in by_torch.reason
