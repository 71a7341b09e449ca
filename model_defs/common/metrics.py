"""A metric of the whole validation set that is no mean of what its batches have, such as a ratio of counts."""

from __future__ import annotations

from typing import Any

from determined.pytorch import MetricReducer
from torch import Tensor


class OfSums(MetricReducer):
    """A function of sums over all samples of all ranks, which a subclass says: ``metric(sums)``."""

    def __init__(self) -> None:
        self.reset()

    def metric(self, sums: Tensor) -> float:
        """The metric of these sums, which are on the CPU."""
        raise NotImplementedError

    def reset(self) -> None:
        self.sums: Tensor | None = None

    def update(self, sums: Tensor) -> None:
        """Add those of a batch, which stay on the device that they are on."""
        self.sums = sums if self.sums is None else self.sums + sums

    def per_slot_reduce(self) -> Tensor | None:
        return None if self.sums is None else self.sums.cpu()

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        return self.metric(sum(each for each in per_slot_metrics if each is not None))
