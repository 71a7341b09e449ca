"""A trial whose ranks share sequences: it is killed as ``tests.interrupted.trials`` is."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from determined_ds import DataParallelTrial, SequenceGroup
from tests.interrupted.trials import FEATURES, _Mortal

WIDTH = 32


class Tokens(torch.nn.Module):
    """Numbers in a row: each is predicted by the one before it and its position."""

    def __init__(self, sequence: SequenceGroup) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(1, WIDTH)
        self.positions = torch.nn.Embedding(FEATURES, WIDTH)
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(WIDTH, 2)  # every parameter divides by two ranks
        self.sequence = sequence

    def forward(self, numbers_BT: torch.Tensor) -> torch.Tensor:
        positions_T = self.sequence.positions(numbers_BT.shape[1], numbers_BT.device)
        hidden = self.embedding(numbers_BT[..., None]) + self.positions(positions_T)
        outputs: torch.Tensor = self.head(self.dropout(hidden))
        return outputs.mean(-1)


class SlicedVictim(_Mortal, DataParallelTrial):
    """Ranks share sequences."""

    sequence_parallel = True

    def build_model(self) -> torch.nn.Module:
        return Tokens(self.sequence)

    def split_sequence(self, batch: Any) -> Any:
        numbers_BT, _ = batch
        targets_BT = functional.pad(numbers_BT[:, 1:], (0, 1), value=torch.nan)
        return self.sequence.cut((numbers_BT, targets_BT))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        numbers_BT, targets_BT = batch
        counts = ~targets_BT.isnan()
        errors = (model(numbers_BT) - targets_BT.nan_to_num()).square() * counts
        return self.sequence.mean(errors.sum(), counts.sum())
