"""A trial whose ranks share sequences, with its own attention: it is killed as ``tests.interrupted.trials`` is."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from determined_ds import DataParallelTrial, SequenceGroup
from tests.interrupted.trials import FEATURES, _Mortal

HEADS, WIDTH = 4, 8


def causal(query_BTHW: Any, key_BTHW: Any, value_BTHW: Any) -> torch.Tensor:
    """What each rank computes: for all tokens, of some heads."""
    parts = (part.transpose(1, 2) for part in (query_BTHW, key_BTHW, value_BTHW))
    return functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


class Tokens(torch.nn.Module):
    """Numbers in a row: each is predicted of those before it."""

    def __init__(self, sequence: SequenceGroup) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(1, HEADS * WIDTH)
        self.positions = torch.nn.Embedding(FEATURES, HEADS * WIDTH)
        self.projections = torch.nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.dropout = torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(HEADS * WIDTH, 1)
        self.sequence = sequence
        self.attention: Any = lambda *tensors: causal(*tensors)
        if sequence.size > 1:
            from deepspeed.sequence.layer import DistributedAttention

            exchanged = DistributedAttention(causal, sequence.process_group, scatter_idx=2, gather_idx=1)
            self.attention = lambda *tensors: exchanged(*tensors, 0)

    def forward(self, numbers_BT: torch.Tensor) -> torch.Tensor:
        samples, tokens = numbers_BT.shape
        positions_T = self.sequence.positions(tokens, numbers_BT.device)
        hidden = self.dropout(self.embedding(numbers_BT[..., None]) + self.positions(positions_T))
        parts = self.projections(hidden).view(samples, tokens, 3, HEADS, WIDTH).unbind(2)
        attended = self.attention(*(part.contiguous() for part in parts))
        return self.head(hidden + attended.reshape(samples, tokens, -1)).squeeze(-1)


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
