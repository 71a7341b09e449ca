"""Steps whose loss or gradient norm spikes, found with the exchange that a report makes anyway.

Each step leaves its loss and its norm on the device. With a report, or before a checkpoint, every rank learns those of
all ranks, and judges each step by the steps before it: the same on all ranks, however often is reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from determined_ds.config.params import OnSpike

MAD_TO_DEVIATION = 1.4826  # of a normal distribution
LEAST_DEVIATION = 1e-3  # of the median: a loss that hardly moves has none of its own
COLUMNS = 3  # of a step: the loss of this rank, whether it has one, and the gradient norm


class Spike(NamedTuple):
    """A step that spikes."""

    batch: int  # from 1
    said: str  # what spikes, and by how much


class SpikeWatch:
    """Finds the steps that spike.

    Args:
        options: ``fit.on_spike``.
        device: Of the training.
    """

    def __init__(self, options: OnSpike, device: torch.device) -> None:
        self._options, self._device = options, device
        # Since the last exchange: what each step has left, then as rows. In between nothing is computed.
        self._steps: list[tuple[Any, float, Any, float, Any]] = []
        self._rows: list[torch.Tensor] = []
        # The sum of losses at the beginning of a step, and its weight.
        self._before: tuple[Any, float] = (None, 0.0)
        self._seen: dict[str, list[float]] = {"loss": [], "gradient norm": []}  # of the steps in the window

    def begin(self, total: torch.Tensor | None, weight: float) -> None:
        """A step begins; the sum of losses since the last report, None where there is none, and its weight."""
        self._before = (total, weight)  # the next sum is another tensor

    def end(self, total: torch.Tensor | None, weight: float, norm: Any) -> None:
        """A step was trained, with DeepSpeed's gradient norm or None. Nothing is read from the device."""
        self._steps.append((total, weight, *self._before, norm))

    def rows(self) -> torch.Tensor:
        """This rank's steps since the last exchange, to ride in a collective."""
        if self._steps:
            totals, weights, befores, had, norms = zip(*self._steps, strict=True)
            added = self._column(weights) - self._column(had)
            losses = (self._column(totals) - self._column(befores)) / added
            columns = (losses.where(added > 0, 0), added > 0, self._column(norms, math.nan))
            self._rows.append(torch.stack([each.to(losses) for each in columns], dim=1))
            self._steps.clear()
        return torch.cat(self._rows) if self._rows else torch.zeros(0, COLUMNS, device=self._device)

    def _column(self, values: Sequence[Any], none: float = 0.0) -> torch.Tensor:
        numbers = [none if each is None else each for each in values]
        if not any(isinstance(each, torch.Tensor) for each in numbers):
            return torch.tensor(numbers, dtype=torch.float64, device=self._device)
        of_each = (
            torch.as_tensor(each, dtype=torch.float64).to(self._device).reshape(()) for each in numbers
        )
        return torch.stack(list(of_each))

    def judge(self, ranks: Sequence[Sequence[float]], batches_trained: int) -> Spike | None:
        """The first step that spikes, by the rows of all ranks up to this batch."""
        steps = np.asarray(ranks, dtype=float).reshape(len(ranks), -1, COLUMNS)
        self._rows.clear()
        for number, step in enumerate(np.moveaxis(steps, 1, 0), batches_trained - steps.shape[1] + 1):
            has_loss, norms = step[:, 1] > 0, step[~np.isnan(step[:, 2]), 2]
            values = {"loss": step[has_loss, 0].mean() if has_loss.any() else None}
            values["gradient norm"] = norms.max() if len(norms) else None
            for name, value in values.items():
                if value is not None and (said := self._judged(name, float(value))):
                    return Spike(number, said)
        return None

    def _judged(self, name: str, value: float) -> str:
        window = self._seen[name]
        if not math.isfinite(value):
            return f"the {name} was not finite"
        if len(window) == self._options.window:
            middle, most = statistics.median(window), self._options.deviations
            least = max(LEAST_DEVIATION * abs(middle), 1e-12)
            if value - middle > most * least:  # so few steps need the second median
                deviation = MAD_TO_DEVIATION * statistics.median([abs(each - middle) for each in window])
                above = (value - middle) / max(deviation, least)
                if above > most:
                    return f"the {name} was {value:.4g}, {above:.0f} deviations above the median {middle:.4g}"
            window.pop(0)
        window.append(value)
        return ""

    def state_dict(self) -> dict[str, Any]:
        """What was seen so far, for a checkpoint."""
        return {"seen": self._seen, "rows": self.rows().cpu()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; with another window what was seen begins anew."""
        window = self._options.window
        self._seen = {name: list(each)[-window:] for name, each in state_dict["seen"].items()}
        self._rows, self._steps = [state_dict["rows"].to(self._device)], []
