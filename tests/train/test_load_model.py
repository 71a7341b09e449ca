"""A model out of a checkpoint, on one process and without an engine, is the model that was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds import load_model_from_checkpoint_path, load_state_dict_from_checkpoint_path
from determined_ds.errors import CheckpointError, ConfigError
from tests.harness.command import ROOT, det_ds

SHORT = (
    "hyperparameters.sequence_length=32",
    "hyperparameters.fit.max_length.batches=2",
    "hyperparameters.fit.validation_period.batches=2",
    "data.max_validation_sequences=64",
)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``run_of("zero3")``: the run directory of a template, trained for two batches; once a module."""
    known: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in known:
            run_dir = tmp_path_factory.mktemp(name) / "run"
            slots = 1 if name == "zero0" else 2
            overrides = [*SHORT, f"resources.slots_per_trial={slots}"]
            options = [option for value in overrides for option in ("--set", value)]
            done = det_ds("run", f"experiments/gpt2/{name}.yaml", ".", *options, "--run-dir", run_dir)
            assert done.returncode == 0, done.stderr
            known[name] = run_dir
        return known[name]

    return run


def checkpoint_of(run_dir: Path) -> Path:
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    return checkpoint


def validation_loss(model: Any, trial_data: Any) -> float:
    """Of all validation samples, each weighing the same."""
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(trial_data), 32):
            samples = [trial_data[index] for index in range(start, min(start + 32, len(trial_data)))]
            tokens_BT = torch.stack([torch.as_tensor(sample[0]) for sample in samples])
            targets_BT = torch.stack([torch.as_tensor(sample[1]) for sample in samples])
            loss = torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())
            total, count = total + float(loss) * len(samples), count + len(samples)
    return total / count


@pytest.mark.parametrize("name", ["zero0", "zero3", "pipeline"])
def test_it_validates_as_it_did_in_training(
    name: str, run_of: Callable[[str], Path], metrics_of: Callable[[Path, str], list[dict[str, Any]]]
) -> None:
    from model_defs.common.text import load_text

    run_dir = run_of(name)
    model = load_model_from_checkpoint_path(checkpoint_of(run_dir), context_dir=ROOT)
    assert not model.training
    data = load_text({"max_validation_sequences": 64}, 32)
    expected = metrics_of(run_dir, "validation")[-1]["validation_loss"]
    assert validation_loss(model, data.validation) == pytest.approx(expected, rel=1e-5)


def test_what_cannot_be_loaded_says_why(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    good = checkpoint_of(run_of("zero0"))
    damaged, other = tmp_path / "damaged", tmp_path / "other"
    for copy in (damaged, other):
        shutil.copytree(good, copy)
    (damaged / "model0" / "rank0.safetensors").write_bytes(b"")
    for path, engine, said in (
        (good, 1, "no engine 1; it has: 0"),
        (tmp_path, 0, r"metadata\.json is missing"),
        (damaged, 0, "0 bytes"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_state_dict_from_checkpoint_path(path, engine=engine)
    (other / "manifest.json").unlink()
    (other / "trial_state.json").unlink()  # as Determined's own loop leaves it: taken on trust
    said = json.loads((other / "load_data.json").read_text())
    said["hparams"]["model_size"] = "small"
    (other / "load_data.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="is of another model than"):
        load_model_from_checkpoint_path(other, context_dir=ROOT)
    (other / "load_data.json").write_text(json.dumps({**said, "trial_cls_spec": "nowhere.trial:Trial"}))
    with pytest.raises(ConfigError, match="there is no module nowhere"):
        load_model_from_checkpoint_path(other, context_dir=ROOT)


def test_determineds_own_loader_takes_no_deepspeed_trial_which_is_said(run_of: Callable[[str], Path]) -> None:
    """In 0.38.1 it builds every trial with the context of a PyTorchTrial."""
    from determined import pytorch

    with pytest.raises(ConfigError, match="load_model_from_checkpoint_path"):
        pytorch.load_trial_from_checkpoint_path(str(checkpoint_of(run_of("zero0"))))
