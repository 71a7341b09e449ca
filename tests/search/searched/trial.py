"""A model to search over, that does as its hyperparameter ``does`` says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from determined_ds import ConfigError, DataLoader, DataParallelTrial
from determined_ds.errors import Problem

HOLD = Path("hold")  # while this file is there, no trial trains its sixth batch
AT = 5


class SearchedTrial(DataParallelTrial):
    """A line through points that lie on one."""

    def build_model(self) -> torch.nn.Module:
        if self.args.does == "refuses":
            raise ConfigError(Problem(key="hyperparameters.does", message="this model cannot be built so"))
        line = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(line.weight)  # so that the larger learning rate is the better, whatever the seed
        torch.nn.init.zeros_(line.bias)
        return line

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs_B4, targets_B1 = batch
        return torch.nn.functional.mse_loss(model(inputs_B4), targets_B1)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == AT:
            self.happen()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    def happen(self) -> None:
        """What a trial does before its sixth batch."""
        while HOLD.exists():
            time.sleep(0.01)
        if self.args.does == "crashes":
            raise RuntimeError("a bad sample")
        if self.args.does == "spoils":
            self.spoil()

    def spoil(self) -> None:
        """Turn a bit of every checkpoint, and crash."""
        run_dir = Path(self.context.get_hparams()["deepspeed_config"]).parent
        for file in (run_dir / "checkpoints").rglob("*.pt"):
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        raise RuntimeError("a bad sample")

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(samples(64, seed=1))

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(samples(10, seed=2))


def samples(count: int, seed: int) -> TensorDataset:
    inputs_B4 = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs_B4, inputs_B4.sum(dim=1, keepdim=True))
