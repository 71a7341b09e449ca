"""A model of one's own: what a context directory needs besides an experiment and a DeepSpeed JSON."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from determined_ds import DataLoader, DataParallelTrial


def samples(count: int, seed: int) -> Dataset[tuple[torch.Tensor, ...]]:
    inputs_B4 = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs_B4, inputs_B4.sum(dim=1, keepdim=True))


class TinyTrial(DataParallelTrial):
    """A line through points that lie on one."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs_B4, targets_B1 = batch
        return torch.nn.functional.mse_loss(model(inputs_B4), targets_B1)

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(samples(64, seed=1))

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(samples(10, seed=2))
