"""``det-ds compare`` and ``autotune`` of a script with a session."""

from __future__ import annotations

from pathlib import Path

from determined_ds import load_results
from tests.harness.command import det_ds

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
    options = ["--steps", "3", "--warmup", "1", "--repeat", "1", "--run-dir", run_dir, "--accelerator", "cpu"]
    strategies = "zero2,zero3,pipeline,ddp"
    done = det_ds("compare", tmp_path / "own.yaml", tmp_path, "--strategies", strategies, *options)
    assert done.returncode == 0, done.stderr
    rows = load_results(run_dir / "results.json").rows
    assert [(row.name, row.status) for row in rows] == [
        ("zero2", "measured"),
        ("zero3", "cannot run"),
        ("pipeline", "cannot run"),
        ("ddp", "cannot run"),
    ]
    measured, other, piped, by_torch = rows
    assert (measured.slots, len(measured.step_seconds), measured.micro_batch_size) == (2, 3, 4)
    assert measured.estimated_model_state_bytes is None
    assert "makes an engine of ZeRO 1 in fp32; the configuration is ZeRO 3 in fp32" in other.reason
    assert "keeps the stages that its code builds" in piped.reason
    assert "makes its engine itself" in by_torch.reason
    assert done.stdout.count("no memory estimate: a script builds its model by itself") == 1
