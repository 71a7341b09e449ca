"""Metrics are summed where they are computed, and reduced over ranks by one collective a report.

A metric of several numbers is reduced to one over all of them, as Determined's harness does: the mean of all elements
of all batches, or their sum, maximum or minimum.

Source: ``make_metrics`` in determined 0.38.1's ``util.py``; ``_average_training_metrics`` and ``_reduce_metrics`` in
``pytorch/_metric_utils.py``, whose ``np.mean``, ``np.average``, ``np.sum``, ``np.max`` and ``np.min`` have no axis.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from determined import pytorch, util

from determined_ds.errors import CheckpointError, ConfigError, Problem, TrainingError
from determined_ds.train.group.process_group import allgather_objects, is_alone, reduce_over_ranks
from determined_ds.trial.author import described, place_of

logger = logging.getLogger("determined_ds")
Reducer = pytorch.Reducer
# MPS has no float64; everything that trains here does.
DTYPE = torch.float64


class Kind(NamedTuple):
    """How a reducer makes one number of several, joins two and reduces over ranks; the value of a rank without any."""

    word: str
    whole: Any
    join: Any
    operation: Any
    absent: float


KINDS = {
    Reducer.AVG: Kind("mean", torch.mean, torch.add, dist.ReduceOp.SUM, 0.0),
    Reducer.SUM: Kind("sum", torch.sum, torch.add, dist.ReduceOp.SUM, 0.0),
    Reducer.MAX: Kind("maximum", torch.max, torch.maximum, dist.ReduceOp.MAX, float("-inf")),
    Reducer.MIN: Kind("minimum", torch.min, torch.minimum, dist.ReduceOp.MIN, float("inf")),
}


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
        self._device, self._reducers, self._source, self._warned = device, reducers, source, warned
        # Agreed upon at the first reduction, and again where a rank meets another name.
        self._names: list[str] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all that was added."""
        self._values: dict[str, torch.Tensor] = {}
        self._weights: dict[str, float] = {}

    def _reducer(self, name: str) -> Reducer:
        reducers = self._reducers
        return reducers.get(name, Reducer.AVG) if isinstance(reducers, Mapping) else reducers

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add the metrics of one batch.

        Args:
            metrics: Name -> number, or tensor, array or list of numbers; not every batch needs all of them.
            weight: Samples that the values are means over; with 0 the batch does not count.
        """
        for name, value in metrics.items():
            before, kind = self._values.get(name), self._reducer(name)
            # Nearly every metric is added by one operation: a scalar on this device with a sum to add it to.
            if (
                before is not None
                and weight
                and isinstance(value, torch.Tensor)
                and not value.ndim
                and value.device == before.device == self._device
                and kind == Reducer.AVG
            ):
                before.add_(value.detach(), alpha=weight)
                self._weights[name] += weight
                continue
            scalar = self._scalar(name, value)
            if not weight:
                continue
            self._weights[name] = self._weights.get(name, 0.0) + weight
            new = scalar * weight if kind == Reducer.AVG else scalar
            self._values[name] = new if before is None else KINDS[kind].join(before, new)

    def running(self, name: str) -> torch.Tensor | None:
        """The sum of a metric since the last reduction, on the device; None where there is none yet."""
        return self._values.get(name)

    def weight(self, name: str) -> float:
        """The total weight of :meth:`running`."""
        return self._weights.get(name, 0.0)

    def _scalar(self, name: str, value: Any) -> torch.Tensor:
        # Numbers on the host are added up there: the host would wait for each copy to a GPU.
        device = self._device if isinstance(value, torch.Tensor) else None
        try:
            if isinstance(value, (list, tuple)) and any(isinstance(item, np.ndarray) for item in value):
                value = np.asarray(
                    value, dtype=np.float64
                )  # torch takes no list of arrays without dimensions
            if value is None or isinstance(value, complex) or (device and value.is_complex()):
                raise TypeError
            tensor = torch.as_tensor(value, dtype=DTYPE, device=device).detach()
            if not tensor.numel():
                raise ValueError
        except (TypeError, ValueError, RuntimeError):
            of = f"{self._source}: " if self._source else ""
            raise TrainingError(
                f"{of}metric {name!r} is {described(value)}\n"
                "  fix: use numbers, or tensors, arrays or lists of numbers"
            ) from None
        if tensor.numel() == 1:
            return tensor.reshape(())
        kind = KINDS[self._reducer(name)]
        if self._warned is not None and name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "warning: %s: metric %r has shape %s; its %s over all elements is reported, as by Determined. To "
                "report the elements, return them from a MetricReducer (context.wrap_reducer).",
                *(self._source, name, tuple(tensor.shape), kind.word),
            )
        return kind.whole(tensor)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        """What was added since the last reduction, for a checkpoint."""
        values = {name: value.cpu() for name, value in self._values.items()}
        return {"values": values, "weights": dict(self._weights)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        self._values = {name: value.to(self._device) for name, value in state_dict["values"].items()}
        self._weights = dict(state_dict["weights"])

    def reduce(self, riders: torch.Tensor | None = None) -> tuple[dict[str, float], list[float]]:
        """The metrics over all batches and ranks since the last call; a collective. All sums begin anew.

        A rank that added no metrics does not count.

        Args:
            riders: More numbers for the same collective: a vector to sum over ranks, of one length on all of them.

        Returns:
            The metrics, and the summed riders.
        """
        num_strangers: float = self._names is None
        while True:
            if num_strangers:  # the names that any rank has, in the same order on all
                gathered = [list(self._values)] if is_alone() else allgather_objects(list(self._values))
                self._names = sorted({name for some in gathered for name in some})
            num_strangers, result, ridden = self._reduced(self._names or [], riders)
            if not num_strangers:
                self.clear()
                return result, ridden

    def _reduced(
        self, names: list[str], riders: torch.Tensor | None
    ) -> tuple[float, dict[str, float], list[float]]:
        """How many names ranks have beside ``names``, the values of these over all ranks, and the riders."""
        head = [len(self._values.keys() - set(names)), *(self._weights.get(name, 0.0) for name in names)]
        rest = [torch.tensor(head, dtype=DTYPE, device=self._device)]
        rest += [] if riders is None else [riders.to(rest[0])]
        values: dict[str, float] = {}
        # The sums go with all the rest; extremes, where there are any, by a collective of their own.
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            of_these = {name: KINDS[self._reducer(name)] for name in names}
            own = [name for name, kind in of_these.items() if kind.operation == operation]
            parts = [self._value(name, of_these[name].absent) for name in own]
            parts += rest if operation == dist.ReduceOp.SUM else []
            if parts:
                vector = torch.cat(parts)
                reduce_over_ranks(vector, operation)
                found = vector.tolist()
                values.update(zip(own, found, strict=False))
                if operation == dist.ReduceOp.SUM:
                    num_strangers, *others = found[len(own) :]
        weights, ridden = dict(zip(names, others, strict=False)), others[len(names) :]
        result = {
            name: values[name] / weights[name] if self._reducer(name) == Reducer.AVG else values[name]
            for name in names
            if weights[name]
        }
        return num_strangers, result, ridden

    def _value(self, name: str, absent: float) -> torch.Tensor:
        value = self._values.get(name)
        if value is None:
            return torch.full((1,), absent, dtype=DTYPE, device=self._device)
        return value.reshape(1).to(self._device)


class Reducers:
    """All reducers that ``context.wrap_reducer`` has wrapped, with one state."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def state_dict(self) -> list[dict[str, Any]]:
        """A copy of the attributes of every reducer, in the order in which they were wrapped.

        Raises:
            CheckpointError: names an attribute that cannot be copied.
        """
        return [self._attributes(wrapped.reducer) for wrapped in self._context._wrapped_reducers]

    def _attributes(self, reducer: Any) -> dict[str, Any]:
        copies, kind = {}, type(reducer)
        for name, value in vars(reducer).items():
            if name == "fn":  # the function of a simple reducer
                continue
            try:
                copies[name] = copy.deepcopy(value)
            except Exception as error:  # whatever an object's own methods raise
                place = place_of(kind)
                raise CheckpointError(
                    f"{kind.__name__}{f' ({place})' if place else ''}: the attribute {name!r} of this reducer is "
                    f"{described(value)}, which cannot be copied ({error}); a validation and a checkpoint copy its "
                    f"values\n  fix: hold it in an attribute of the class, not of the object: {name} = ... under class "
                    f"{kind.__name__}"
                ) from error
        return copies

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


# ------------------------------------------------------------------------------------ values as they are reported


def plain(metrics: Mapping[str, Any], source: str, *, for_training: bool = False) -> dict[str, Any]:
    """Metrics as numbers, strings, lists and dicts, which a master takes and JSON can hold.

    Raises:
        TrainingError: a value cannot be reported in any form, or is None in a validation.

    Source: ``json_encode`` in determined 0.38.1's ``util.py``; ``_get_serializable_metrics`` in ``core/_train.py``.
    """
    found = {}
    for name, value in metrics.items():
        try:
            if value is None and not for_training:
                raise TypeError
            found[str(name)] = _plain(value)
        except TypeError as error:
            inside = f" that holds {error}" if str(error) else ""
            raise TrainingError(
                f"{source}: metric {name!r} is {described(value)}{inside}\n"
                "  fix: return numbers, strings, tensors, arrays, or lists and dicts of them"
            ) from None
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TypeError(described(value))


def searched(metrics: Mapping[str, Any], name: str, trial: Any) -> float:
    """The value of the searcher's metric.

    Raises:
        ConfigError: the trial does not report it, or not as a number.
    """
    if name in metrics and util.is_numerical_scalar(metrics[name]):
        return float(metrics[name])
    known = ", ".join(sorted(metrics))
    message, fix = f"the trial reports {known}", f"name one of them: {known}"
    if name in metrics:
        kind, value = type(trial).__name__, described(metrics[name])
        message = f"{kind} reports {value} by this name, and a search compares numbers"
        fix = "name a metric that is a number, or report one besides, such as its mean"
    problem = {"key": "searcher.metric", "value": name, "code": "searcher-metric"}
    raise ConfigError(Problem(message=message, fix=fix, **problem))
