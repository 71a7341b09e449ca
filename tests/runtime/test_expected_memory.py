"""A run records what the memory model expects of its engines, counted as they are, whichever rank holds what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from determined_ds.memory.model_shape import ModelShape
from determined_ds.runtime.expected_memory import _whole
from tests.ranks import Ranks


def train(run_dir: str, zero_stage: int) -> None:
    """In a rank: train a batch of a small model."""
    import torch
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    class Linear(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(40, 20)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return model(batch[0]).square().mean()

        def build_training_data_loader(self) -> Any:
            return self.training_loader(torch.utils.data.TensorDataset(torch.ones(8, 40)))

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(torch.utils.data.TensorDataset(torch.ones(8, 40)))

        def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
            return {"validation_loss": self.loss(model, batch)}

    ds_config = {
        "zero_optimization": {"stage": zero_stage, "reduce_bucket_size": 100},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        Trainer(Linear(context), context).fit(max_length=Batch(1))


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_model_is_counted_whole_where_ranks_share_it(
    two_ranks: Ranks, tmp_path: Path, zero_stage: int
) -> None:
    two_ranks.run(train, str(tmp_path), zero_stage)
    found = json.loads((tmp_path / "memory.json").read_text())
    assert [each["parameters"] for each in found["engines"]] == [40 * 20 + 20]
    assert 820 * 4 < found["model_states_bytes"] <= found["total_bytes"] < 1e6
    assert found["has_activations"] is False


def test_the_stages_of_a_pipeline_are_one_model() -> None:
    """Of each stage, however many replicas have it."""
    first = ModelShape(num_parameters=100, largest_layer_parameters=60)
    last = ModelShape(num_parameters=40, num_trainable_parameters=10, largest_layer_parameters=30)
    whole = _whole([(0, first), (0, first), (1, last), (1, last)])
    assert (whole.num_parameters, whole.trainable, whole.stage_parameters) == (140, 110, (100, 40))
    assert whole.largest_layer == 60
    assert _whole([(0, first), (0, first)]) == first
