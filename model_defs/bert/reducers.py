"""Macro F1 over any number of ranks: each counts, the counts are summed, and then comes the quotient.

A mean of the F1 of batches, or of ranks, is another number.

Legend of shape suffixes: B batch, K classes; of KK the first is true, the second predicted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from determined import pytorch


class MacroF1(pytorch.MetricReducer):
    """Counts of (true, predicted) pairs, reduced to F1 over classes.

    Args:
        num_labels: K.
    """

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels
        self.reset()

    def reset(self) -> None:
        self.counts_KK = torch.zeros(self.num_labels, self.num_labels, dtype=torch.int64)

    def update(self, labels_B: torch.Tensor, predicted_B: torch.Tensor) -> None:
        """Count a batch, on the device that it is on."""
        pairs_B = labels_B * self.num_labels + predicted_B
        counts = torch.bincount(pairs_B, minlength=self.num_labels**2)
        self.counts_KK = self.counts_KK.to(counts.device) + counts.view(self.num_labels, self.num_labels)

    def per_slot_reduce(self) -> list[list[int]]:
        counts: list[list[int]] = self.counts_KK.tolist()
        return counts

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        return macro_f1(np.sum(per_slot_metrics, axis=0))


def macro_f1(counts_KK: np.ndarray) -> float:
    """The mean over classes of 2 x true positives / (predicted + there), of those that are either.

    As scikit-learn's ``f1_score(average="macro")``.
    """
    hits_K = np.diagonal(counts_KK)
    either_K = counts_KK.sum(axis=0) + counts_KK.sum(axis=1)
    present_K = either_K > 0
    return float(np.mean(2 * hits_K[present_K] / either_K[present_K])) if present_K.any() else 0.0
