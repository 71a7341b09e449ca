"""Loss and perplexity of validation, over tokens: right for any number of ranks and any size of batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from determined import pytorch


class TokenLoss(pytorch.MetricReducer):
    """Sums nats and tokens; ``validation_loss`` is their quotient, ``validation_perplexity`` its exponential."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.nats: Any = 0.0
        self.num_tokens = 0

    def update(self, mean_nats: torch.Tensor, num_tokens: int) -> None:
        """Add a batch.

        Args:
            mean_nats: Mean loss of its tokens; stays on the device.
            num_tokens: How many they are.
        """
        self.nats = self.nats + mean_nats.detach().double() * num_tokens
        self.num_tokens += num_tokens

    def per_slot_reduce(self) -> tuple[float, int]:
        return float(self.nats), self.num_tokens

    def cross_slot_reduce(self, per_slot_metrics: list[tuple[float, int]]) -> dict[str, float]:
        nats, num_tokens = (sum(column) for column in zip(*per_slot_metrics, strict=True))
        loss = nats / num_tokens
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"validation_loss": loss, "validation_perplexity": perplexity}
