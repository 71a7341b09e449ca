"""A model out of a checkpoint, on one process and without an engine, is the model that was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds import load_model_from_checkpoint_path, load_state_dict_from_checkpoint_path
from determined_ds.errors import CheckpointError, ConfigError
from tests.command import ROOT, det_ds

SHORT = ("hyperparameters.fit.max_length.batches=3", "hyperparameters.fit.validation_period.batches=3")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``run_of("zero3")``: the run directory of a template, trained for three batches; once a module."""
    known: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in known:
            run_dir = tmp_path_factory.mktemp(name) / "run"
            options = [option for value in SHORT for option in ("--set", value)]
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


@pytest.mark.parametrize("name", ["zero0", "zero2", "zero3", "pipeline"])
def test_it_validates_as_it_did_in_training(
    name: str, run_of: Callable[[str], Path], metrics_of: Callable[[Path, str], list[dict[str, Any]]]
) -> None:
    from model_defs.gpt2.data import load_text

    run_dir = run_of(name)
    model = load_model_from_checkpoint_path(checkpoint_of(run_dir), context_dir=ROOT)
    assert not model.training
    data = load_text({}, 128)
    expected = metrics_of(run_dir, "validation")[-1]["validation_loss"]
    assert validation_loss(model, data.validation) == pytest.approx(expected, rel=1e-5)


def test_its_weights_have_hugging_faces_names(run_of: Callable[[str], Path]) -> None:
    weights = load_state_dict_from_checkpoint_path(checkpoint_of(run_of("zero3")))
    assert "transformer.h.3.mlp.c_fc.weight" in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_what_cannot_be_loaded_says_why(run_of: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    good = checkpoint_of(run_of("zero2"))
    with pytest.raises(CheckpointError, match="no engine 1; it has: model0"):
        load_state_dict_from_checkpoint_path(good, engine=1)
    with pytest.raises(CheckpointError, match=r"metadata\.json is missing"):
        load_state_dict_from_checkpoint_path(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(good, damaged)
    (damaged / "model0" / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="0 bytes"):
        load_state_dict_from_checkpoint_path(damaged)
    other = tmp_path / "other"
    shutil.copytree(good, other)
    (other / "manifest.json").unlink()
    (other / "trial_state.json").unlink()  # as Determined's own loop leaves it: taken on trust
    said = json.loads((other / "load_data.json").read_text())
    said["hparams"]["model_size"] = "small"
    (other / "load_data.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="is of another model than"):
        load_model_from_checkpoint_path(other, context_dir=ROOT)
    said["trial_cls_spec"] = "nowhere.trial:Trial"
    (other / "load_data.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_model_from_checkpoint_path(other, context_dir=ROOT)
