"""A model out of a checkpoint, on one process and without an engine, is the model that was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from determined_ds import load_model_from_checkpoint_path
from tests.harness.command import ROOT, det_ds
from tests.package import records

SHORT = (
    "hyperparameters.sequence_length=32",
    "hyperparameters.fit.max_length.batches=2",
    "hyperparameters.fit.validation_period.batches=2",
    "data.max_validation_sequences=64",
)


@pytest.mark.parametrize("name", ["zero0", "zero3", "pipeline"])
def test_it_validates_as_it_did_in_training(name: str, tmp_path: Path) -> None:
    """A template, trained for two batches."""
    from model_defs.common.text import load_text, next_token_loss

    overrides = [*SHORT, f"resources.slots_per_trial={1 if name == 'zero0' else 2}"]
    options = [option for value in overrides for option in ("--set", value)]
    done = det_ds("run", f"experiments/gpt2/{name}.yaml", ".", *options, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    [checkpoint] = (tmp_path / "run/checkpoints").iterdir()
    model = load_model_from_checkpoint_path(checkpoint, context_dir=ROOT)
    assert not model.training
    samples = load_text({"max_validation_sequences": 64}, 32).validation
    tokens, targets = (torch.stack(part) for part in zip(*(samples[i] for i in range(64)), strict=True))
    with torch.no_grad():
        loss = float(next_token_loss(model(tokens), targets))
    *_, (_, validated) = records(tmp_path / "run", "validation")
    assert loss == pytest.approx(validated["validation_loss"], rel=1e-5)
