"""The trial whose checkpoints are measured where no experiment is given: a transformer on random tokens."""

from __future__ import annotations

from typing import Any

import torch
from determined.pytorch import DataLoader

from determined_ds.runtime.benching.decoder import Decoder
from determined_ds.runtime.benching.model_sizes import shape_named
from determined_ds.trial.data_parallel import DataParallelTrial


class BenchTrial(DataParallelTrial):
    """One sample a rank and step."""

    def prepare(self) -> None:
        hparams = self.context.get_hparams()
        self.shape = shape_named(hparams["model"], self.context.device.type)
        self.data = torch.utils.data.TensorDataset(
            torch.randint(self.shape.vocab_size, (64, self.shape.sequence_length))
        )

    def build_model(self) -> torch.nn.Module:
        return Decoder(self.shape)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        (tokens_BT,) = batch
        found: torch.Tensor = model(tokens_BT)
        return found

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data)
