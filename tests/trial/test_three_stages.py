"""A pipeline of three stages: floats go through the middle; integers, which would arrive as something else, do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import Ranks, RanksFailed


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(3, tmp_path_factory.mktemp("three"))


class Layer(torch.nn.Linear):
    """Hands on a mask beside its output, as a model does that is cut where its padding is still needed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(4, 4)
        self.mask_dtype = dtype

    def forward(self, inputs: Any) -> Any:  # type: ignore[override]
        hidden, mask = inputs if isinstance(inputs, tuple) else (inputs, 1)
        output = super().forward(hidden * mask)
        return output, (output * 0 + 1).to(self.mask_dtype)


def first_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs[0], targets)


def train_one_batch(dtype: torch.dtype) -> float:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group
    from determined_ds.trial.engine import fix_engine

    join_process_group(detect_accelerator("cpu"))
    module = PipelineModule([LayerSpec(Layer, dtype) for _ in range(3)], num_stages=3, loss_fn=first_of)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    fix_engine(engine)
    batches = iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2)
    return float(engine.train_batch(batches))


def test_what_goes_through_the_middle(three_ranks: Ranks) -> None:
    losses = three_ranks.run(train_one_batch, torch.float32)
    assert len(set(losses)) == 1
    with pytest.raises(RanksFailed, match=r"stage 0 sends torch\.int64"):
        three_ranks.run(train_one_batch, torch.int64)
