"""Intersection over union, summed over everything before it is divided."""

from __future__ import annotations

from typing import Any

import torch
from determined.pytorch import MetricReducer
from torch import Tensor


class IoU(MetricReducer):
    """Intersection over union of all samples on all ranks: a ratio of sums, not a mean of ratios.

    For ``context.wrap_reducer``. The sums stay on the device until they are reduced.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts: Tensor | None = None

    def update(self, predicted: Tensor, target: Tensor) -> None:
        """Count the pixels of a batch.

        Args:
            predicted: bool, of any shape.
            target: bool, of the same shape.
        """
        counts = torch.stack([(predicted & target).sum(), (predicted | target).sum()])
        self.counts = counts if self.counts is None else self.counts + counts

    def per_slot_reduce(self) -> list[int]:
        return [0, 0] if self.counts is None else self.counts.tolist()

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        """1 where there is nothing to find and nothing was found."""
        intersection, union = (sum(counts) for counts in zip(*per_slot_metrics, strict=True))
        return intersection / union if union else 1.0
