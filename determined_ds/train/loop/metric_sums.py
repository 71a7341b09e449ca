"""Metrics are summed where they are computed, and reduced over ranks by one collective a report.

A metric of several numbers is reduced to one over all of them, as Determined's harness does: the mean of all elements
of all batches, or their sum, maximum or minimum.

Source: ``make_metrics`` in determined 0.38.1's ``util.py``; ``_average_training_metrics`` and ``_reduce_metrics`` in
``pytorch/_metric_utils.py``, whose ``np.mean``, ``np.average``, ``np.sum``, ``np.max`` and ``np.min`` have no axis.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from determined import pytorch

from determined_ds.errors import TrainingError
from determined_ds.train.group.collectives import allgather_objects, is_alone, reduce_over_ranks
from determined_ds.trial.author import described

logger = logging.getLogger("determined_ds")
Reducer = pytorch.Reducer
# More numbers in one metric are outputs of a model that were returned by mistake.
MAX_NUMBERS = 100_000
WORDS = {Reducer.AVG: "mean", Reducer.SUM: "sum", Reducer.MAX: "maximum", Reducer.MIN: "minimum"}
OF_ELEMENTS: dict[Reducer, Callable[[torch.Tensor], torch.Tensor]] = {
    Reducer.AVG: torch.mean,
    Reducer.SUM: torch.sum,
    Reducer.MAX: torch.max,
    Reducer.MIN: torch.min,
}
# MPS has no float64; everything that trains here does.
DTYPE = torch.float64


class MetricSums:
    """Weighted sums of metrics over batches and ranks. Nothing is moved to the host before :meth:`reduce`.

    Args:
        device: Of the training backend.
        reducers: How each metric is reduced, or one for all; the weighted mean by default.
        source: The method that returned the metrics, for messages.
        warned: Names of metrics of several numbers that a warning has named already; None: no warnings.
    """

    def __init__(
        self,
        device: torch.device,
        reducers: Reducer | Mapping[str, Reducer] = Reducer.AVG,
        *,
        source: str = "",
        warned: set[str] | None = None,
    ) -> None:
        self._device = device
        self._reducers = reducers
        self._source = source
        self._warned = warned
        # Agreed upon at the first reduction, and again where a rank meets another name.
        self._names: list[str] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all that was added."""
        self._values: dict[str, torch.Tensor] = {}
        self._weights: dict[str, float] = {}

    def _reducer(self, name: str) -> Reducer:
        if isinstance(self._reducers, Mapping):
            return self._reducers.get(name, Reducer.AVG)
        return self._reducers

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add the metrics of one batch.

        Args:
            metrics: Name -> number, or tensor, array or list of numbers; not every batch needs all of them.
            weight: Samples that the values are means over; with 0 the batch does not count.
        """
        for name, value in metrics.items():
            if self._added_in_place(name, value, weight):
                continue
            scalar, kind = self._scalar(name, value), self._reducer(name)
            if not weight:
                continue
            self._weights[name] = self._weights.get(name, 0.0) + weight
            before = self._values.get(name)
            new = scalar * weight if kind == Reducer.AVG else scalar
            join = {Reducer.MAX: torch.maximum, Reducer.MIN: torch.minimum}.get(kind, torch.add)
            self._values[name] = new if before is None else join(before, new)

    def _added_in_place(self, name: str, value: Any, weight: float) -> bool:
        """Add nearly every metric by one operation: a scalar on this device with a sum to add it to."""
        before = self._values.get(name)
        if before is None or not weight or not isinstance(value, torch.Tensor) or value.ndim:
            return False
        if not value.device == before.device == self._device or self._reducer(name) != Reducer.AVG:
            return False
        before.add_(value.detach(), alpha=weight)
        self._weights[name] += weight
        return True

    def running(self, name: str) -> torch.Tensor | None:
        """The sum of a metric since the last reduction, on the device; None where there is none yet."""
        return self._values.get(name)

    def weight(self, name: str) -> float:
        """The total weight of :meth:`running`."""
        return self._weights.get(name, 0.0)

    def _scalar(self, name: str, value: Any) -> torch.Tensor:
        is_complex = value.is_complex() if isinstance(value, torch.Tensor) else isinstance(value, complex)
        try:
            if is_complex or value is None:
                raise TypeError
            # Numbers on the host are added up there: the host would wait for each copy to a GPU.
            device = self._device if isinstance(value, torch.Tensor) else None
            if isinstance(value, (list, tuple)) and any(isinstance(item, np.ndarray) for item in value):
                value = np.asarray(
                    value, dtype=np.float64
                )  # torch takes no list of arrays without dimensions
            tensor = torch.as_tensor(value, dtype=DTYPE, device=device).detach()
        except (TypeError, ValueError, RuntimeError):
            fix = "use numbers, or tensors, arrays or lists of numbers"
            raise self._refused(name, described(value), fix) from None
        if tensor.numel() == 1:
            return tensor.reshape(())
        shape, kind = tuple(tensor.shape), self._reducer(name)
        if not 0 < tensor.numel() <= MAX_NUMBERS:
            what = f"{tensor.numel():,} numbers of shape {shape}; a metric has 1 to {MAX_NUMBERS:,}"
            raise self._refused(name, what, "return a scalar, or leave it out of the metrics")
        if self._warned is not None and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "warning: %s: metric %r has shape %s; its %s over all elements is reported, as by Determined. To "
                "report the elements, return them from a MetricReducer (context.wrap_reducer).",
                *(self._source, name, shape, WORDS[kind]),
            )
        return OF_ELEMENTS[kind](tensor)

    def _refused(self, name: str, what: str, fix: str) -> TrainingError:
        of = f"{self._source}: " if self._source else ""
        return TrainingError(f"{of}metric {name!r} is {what}\n  fix: {fix}")

    def state_dict(self) -> dict[str, Any]:
        """What was added since the last reduction, for a checkpoint."""
        values = {name: value.cpu() for name, value in self._values.items()}
        return {"values": values, "weights": dict(self._weights)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._values = {name: value.to(self._device) for name, value in state_dict["values"].items()}
        self._weights = dict(state_dict["weights"])

    def reduce(self) -> dict[str, float]:
        """The metrics over all batches and ranks since the last call; a collective.

        A rank that added no metrics does not count.
        """
        return self.reduce_with(None)[0]

    def reduce_with(self, riders: torch.Tensor | None) -> tuple[dict[str, float], list[float]]:
        """As :meth:`reduce`, with more numbers in the same collective.

        Args:
            riders: A vector to sum over ranks, of one length on all of them, or None.

        Returns:
            The metrics, and the summed riders.
        """
        if self._names is None:
            self._names = self._all_names()
        while True:
            strangers, result, ridden = self._reduce(self._names, riders)
            if not strangers:
                break
            self._names = self._all_names()
        self.clear()
        return result, ridden

    def _reduce(
        self, names: list[str], riders: torch.Tensor | None
    ) -> tuple[float, dict[str, float], list[float]]:
        """How many names ranks have beside ``names``, the values of these over all ranks, and the riders."""
        strangers = len(self._values.keys() - set(names))
        weights = [self._weights.get(name, 0.0) for name in names]
        head = torch.tensor([strangers, *weights], dtype=DTYPE, device=self._device)
        sums = [name for name in names if self._reducer(name) in (Reducer.AVG, Reducer.SUM)]
        tail = [] if riders is None else [riders.to(head)]
        vector = torch.cat([head, *(self._value(name, 0.0) for name in sums), *tail])
        reduce_over_ranks(vector)
        num_strangers, *reduced = vector.tolist()
        weight = dict(zip(names, reduced, strict=False))
        values = dict(zip(sums, reduced[len(names) :], strict=False))
        for kind, worst, operation in (
            (Reducer.MAX, float("-inf"), dist.ReduceOp.MAX),
            (Reducer.MIN, float("inf"), dist.ReduceOp.MIN),
        ):
            extremes = [name for name in names if self._reducer(name) == kind]
            if extremes:
                vector = torch.cat([self._value(name, worst) for name in extremes])
                reduce_over_ranks(vector, operation)
                values.update(zip(extremes, vector.tolist(), strict=True))
        result = {
            name: values[name] / weight[name] if self._reducer(name) == Reducer.AVG else values[name]
            for name in names
            if weight[name]
        }
        return num_strangers, result, reduced[len(names) + len(sums) :]

    def _value(self, name: str, absent: float) -> torch.Tensor:
        value = self._values.get(name)
        if value is None:
            return torch.full((1,), absent, dtype=DTYPE, device=self._device)
        return value.reshape(1).to(self._device)

    def _all_names(self) -> list[str]:
        """The names that any rank has, in the same order on all."""
        names = sorted(self._values)
        if not is_alone():
            gathered = allgather_objects(names, device=self._device)
            names = sorted({name for some in gathered for name in some})
        return names
