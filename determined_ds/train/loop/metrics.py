"""Metrics are summed where they are computed, and reduced over ranks by one collective a report.

A metric of several numbers is reduced to one over all of them, as Determined's harness does: the mean of all elements
of all batches, or their sum, maximum or minimum.

Source: ``make_metrics`` in determined 0.38.1's ``util.py``; ``_average_training_metrics`` and ``_reduce_metrics`` in
``pytorch/_metric_utils.py``, whose ``np.mean``, ``np.average``, ``np.sum``, ``np.max`` and ``np.min`` have no axis.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from determined import pytorch, util

from determined_ds.errors import TrainingError
from determined_ds.train.group.process_group import gather_objects, gather_rows
from determined_ds.trial.returned import described, refused

Reducer = pytorch.Reducer
# MPS has no float64; everything that trains here does.
DTYPE = torch.float64
# How a reducer makes one number of several, and joins two, of batches or of ranks.
KINDS: dict[Reducer, tuple[Any, Any]] = {
    Reducer.AVG: (torch.mean, torch.add),
    Reducer.SUM: (torch.sum, torch.add),
    Reducer.MAX: (torch.max, torch.maximum),
    Reducer.MIN: (torch.min, torch.minimum),
}


class MetricSums:
    """Weighted sums of metrics over batches and ranks. Nothing is moved to the host before :meth:`reduce`.

    Args:
        device: Of the training backend.
        source: The method that returned the metrics, for messages.
        reducers: How metrics are reduced, by name; None: by ``default``, the weighted mean.
    """

    def __init__(
        self, device: torch.device, *, source: str, reducers: Any = None, default: Reducer = Reducer.AVG
    ) -> None:
        self._device, self._source, self._default = device, source, default
        self._reducers: Mapping[str, Reducer] = reducers or {}
        # Agreed upon at the first reduction, and again where a rank meets another name.
        self._names: list[str] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all that was added."""
        self._values: dict[str, torch.Tensor] = {}
        self._weights: dict[str, float] = {}

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add those of a batch: numbers, or tensors, arrays or lists of them; without a weight it does not count."""
        for name, value in metrics.items():
            kind, before = self._reducers.get(name, self._default), self._values.get(name)
            try:
                if isinstance(value, (list, tuple)) and any(isinstance(each, np.ndarray) for each in value):
                    value = np.asarray(value, dtype=float)  # torch takes no list of arrays without dimensions
                if isinstance(value, torch.Tensor):
                    new = value.detach().to(self._device)
                else:  # on the host, where they are added up: it would wait for each copy to a GPU
                    new = torch.as_tensor(value, dtype=DTYPE)
                if not new.numel() or new.is_complex():
                    raise ValueError
            except (TypeError, ValueError, RuntimeError):
                raise TrainingError(
                    f"{self._source}: metric {name!r} is {described(value)}\n"
                    "  fix: use numbers, or tensors, arrays or lists of numbers"
                ) from None
            new = KINDS[kind][0](new.to(DTYPE)) if new.ndim else new
            if not weight:
                continue
            self._weights[name] = self._weights.get(name, 0.0) + weight
            if before is None:
                self._values[name] = new.to(DTYPE) * (weight if kind == Reducer.AVG else 1)
            elif kind == Reducer.AVG:  # by one operation, of a scalar on this device
                self._values[name] = torch.add(before, new, alpha=weight)
            else:
                self._values[name] = KINDS[kind][1](before, new)

    def running(self, name: str) -> tuple[torch.Tensor | None, float]:
        """The sum of a metric since the last reduction, on the device, and its weight; None where there is none yet."""
        return self._values.get(name), self._weights.get(name, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """What was added since the last reduction, for a checkpoint."""
        values = {name: value.cpu() for name, value in self._values.items()}
        return {"values": values, "weights": dict(self._weights)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._values = {name: value.to(self._device) for name, value in state_dict["values"].items()}
        self._weights = dict(state_dict["weights"])

    def reduce(self, *riders: torch.Tensor) -> tuple[dict[str, float], list[list[float]]]:
        """The metrics over all batches and ranks since the last call; a collective. All sums begin anew.

        A rank that added no metrics does not count. Riders are more numbers for the same collective, as many on each
        rank; those of each rank are returned beside the metrics.
        """
        while True:
            if self._names is None:  # those that any rank has, in the same order on all
                self._names = sorted({name for own in gather_objects(list(self._values)) for name in own})
            names, none = self._names, torch.zeros((), dtype=DTYPE, device=self._device)
            head = [len(self._values.keys() - set(names)), *(self._weights.get(name, 0.0) for name in names)]
            values = torch.stack([self._values.get(name, none).to(self._device) for name in (*names, "")])
            parts = [torch.tensor(head, dtype=DTYPE, device=self._device), values, *riders]
            rows = gather_rows(torch.cat([part.reshape(-1).to(values) for part in parts]))
            if not rows[:, 0].any():
                break
            self._names = None
        self.clear()
        result = {}
        for at, name in enumerate(names, start=1):
            weights, kind = rows[:, at], self._reducers.get(name, self._default)
            own = rows[weights > 0, at + len(names)]
            if len(own):
                value = functools.reduce(KINDS[kind][1], own)
                result[name] = float(value / weights.sum() if kind == Reducer.AVG else value)
        return result, rows[:, 2 * len(names) + 2 :].tolist()


class Reducers:
    """All reducers that ``context.wrap_reducer`` has wrapped, with one state."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def state_dict(self) -> list[dict[str, Any]]:
        """A copy of the attributes of every reducer, in the order in which they were wrapped."""
        wrapped = (vars(each.reducer) for each in self._context._wrapped_reducers)
        # ``fn`` is the function of a simple reducer.
        return [copy.deepcopy({name: own[name] for name in own if name != "fn"}) for own in wrapped]

    def load_state_dict(self, state_dict: list[Any]) -> None:
        """Continue from :meth:`state_dict`."""
        for wrapped, state in zip(self._context._wrapped_reducers, state_dict, strict=False):
            vars(wrapped.reducer).update(copy.deepcopy(state))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """At the end they have the values of the beginning, also where that is an error."""
        state = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(state)


def plain(metrics: Mapping[str, Any], source: str, *, for_training: bool = False) -> dict[str, Any]:
    """Metrics as numbers, strings, lists and dicts, which a master takes and JSON can hold."""

    def as_plain(value: Any) -> Any:
        if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            value = value.tolist()
        if value is None or isinstance(value, (str, bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {str(key): as_plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [as_plain(item) for item in value]
        raise TypeError(described(value))

    found = {}
    for name, value in metrics.items():
        try:
            if value is None and not for_training:
                raise TypeError("None")
            found[str(name)] = as_plain(value)
        except TypeError as error:
            raise TrainingError(
                f"{source}: metric {name!r} is {described(value)}, of which {error} cannot be reported\n"
                "  fix: return numbers, strings, tensors, arrays, or lists and dicts of them"
            ) from None
    return found


def searched(metrics: Mapping[str, Any], name: str) -> float:
    """The value of the searcher's metric."""
    numbers = {each: value for each, value in metrics.items() if util.is_numerical_scalar(value)}
    if name in numbers:
        return float(numbers[name])
    what = described(metrics[name]) if name in metrics else "no metric"
    names = ", ".join(sorted(numbers))
    fix = f"name a number that it reports: {names}" if names else "report a number by this name"
    raise refused(
        "searcher.metric", f"the trial reports {what} by this name", fix, "searcher-metric", value=name
    )
