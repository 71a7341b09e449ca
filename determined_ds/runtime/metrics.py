"""Metrics are summed where they are computed, and reduced once a report by one collective."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from determined import pytorch

from determined_ds.errors import TrainingError

Reducer = pytorch.Reducer


class MetricSums:
    """Weighted sums of scalar metrics over batches and ranks.

    Nothing is moved to the host before :meth:`reduce`.

    Args:
        device: Of the training backend.
        reducers: How each metric is reduced, or one for all; the weighted mean by default.
    """

    def __init__(
        self, device: torch.device, reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG
    ) -> None:
        self._device = device
        self._reducers = reducers
        # MPS has no float64; everything that trains here does.
        self._dtype = torch.float64
        self.clear()

    def clear(self) -> None:
        """Forget all that was added."""
        self._values: dict[str, torch.Tensor] = {}
        self._weight = 0.0

    def _reducer(self, name: str) -> Reducer:
        return self._reducers.get(name, Reducer.AVG) if isinstance(self._reducers, Mapping) else self._reducers

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add the metrics of one batch.

        Args:
            metrics: Name -> scalar tensor or number; the same names each time.
            weight: Samples that the values are means over; 0 leaves no trace but the names.
        """
        self._weight += weight
        for name, value in metrics.items():
            scalar = self._scalar(name, value)
            kind = self._reducer(name)
            before = self._values.get(name)
            if kind == Reducer.AVG:
                addend = scalar * weight if weight else torch.zeros_like(scalar)
                self._values[name] = addend if before is None else before + addend
            elif kind == Reducer.SUM:
                addend = scalar if weight else torch.zeros_like(scalar)
                self._values[name] = addend if before is None else before + addend
            else:
                worst = float("-inf") if kind == Reducer.MAX else float("inf")
                candidate = scalar if weight else torch.full_like(scalar, worst)
                pick = torch.maximum if kind == Reducer.MAX else torch.minimum
                self._values[name] = candidate if before is None else pick(before, candidate)

    def _scalar(self, name: str, value: Any) -> torch.Tensor:
        try:
            tensor = torch.as_tensor(value, dtype=self._dtype, device=self._device).detach()
        except (TypeError, ValueError):
            raise TrainingError(f"metric {name!r} is {value!r}: return numbers or tensors") from None
        if tensor.numel() != 1:
            shape = tuple(tensor.shape)
            raise TrainingError(f"metric {name!r} has shape {shape}: return a scalar, or use a MetricReducer")
        return tensor.reshape(())

    def reduce(self) -> dict[str, float]:
        """The metrics over all batches and ranks since the last call, and start anew.

        A collective: every rank calls it, having added metrics of the same names.
        """
        names = sorted(self._values)
        sums = [name for name in names if self._reducer(name) in (Reducer.AVG, Reducer.SUM)]
        weight = torch.tensor(self._weight, dtype=self._dtype, device=self._device)
        vector = torch.stack([weight, *(self._values[name] for name in sums)])
        _all_reduce(vector, dist.ReduceOp.SUM)
        total, *reduced = vector.tolist()
        result = {
            name: value / total if self._reducer(name) == Reducer.AVG and total else value
            for name, value in zip(sums, reduced, strict=True)
        }
        for kind, operation in ((Reducer.MAX, dist.ReduceOp.MAX), (Reducer.MIN, dist.ReduceOp.MIN)):
            extremes = [name for name in names if self._reducer(name) == kind]
            if extremes:
                vector = torch.stack([self._values[name] for name in extremes])
                _all_reduce(vector, operation)
                result.update(zip(extremes, vector.tolist(), strict=True))
        self.clear()
        return result


def _all_reduce(vector: torch.Tensor, operation: Any) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(vector, op=operation)


def jsonable(value: Any) -> Any:
    """A metric as strict JSON can hold it: tensors and numpy scalars as numbers, non-finite ones as words."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


def to_json_line(record: Mapping[str, Any]) -> str:
    """One line of ``metrics.jsonl``."""
    return json.dumps(jsonable(record), allow_nan=False) + "\n"
