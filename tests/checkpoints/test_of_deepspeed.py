"""A checkpoint that DeepSpeed wrote by itself: its weights are exported and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch

from tests.checkpoints.command import succeeded
from tests.harness.ranks import Ranks
from tests.package import checkpoints
from tests.train import small


def train(run_dir: Path, stage: int, resume: Path | None = None, more: str = "") -> Any:
    """In a rank: train two batches; the trial saves its engine by DeepSpeed alone. Returns the weights.

    With ``more``, the model has another parameter of this name.
    """
    import deepspeed
    import torch

    class Own(small.linear_trial()):  # type: ignore[misc]
        def save(self, context: Any, path: Path) -> None:
            self.engine.save_checkpoint(str(path), tag="model0")

        def build_model(self) -> Any:
            model = super().build_model()
            if more:
                model.register_parameter(more, torch.nn.Parameter(torch.zeros(3)))
            return model

    how: dict[str, Any] = {"max_length": ("batches", 2), "latest_checkpoint": resume and str(resume)}
    trial = small.fit(run_dir, Own, hparams=small.hyperparameters(stage), **how)
    parameters = dict(trial.engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=stage == 3):
        return {name: value.detach().numpy().copy() for name, value in parameters.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_its_weights_are_exported_and_another_models_are_refused_by_name(
    stage: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    """DeepSpeed itself copies flat partitions under ZeRO 3, whatever they are of."""
    weights, _ = two_ranks.run(train, tmp_path / "run", stage)
    [path] = checkpoints(tmp_path / "run")
    assert not (path / "model0" / "index.json").exists()
    succeeded("export", path, "--to", "safetensors", "--output", tmp_path / "out")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name].numpy(), weight) for name, weight in weights.items())
    two_ranks.run(train, tmp_path / "same", stage, resume=path)
    refusal = r"does not fit this model.*added is missing in it, \(3,\) here"
    with pytest.raises(AssertionError, match=refusal):
        two_ranks.run(train, tmp_path / "other", stage, resume=path, more="added")
