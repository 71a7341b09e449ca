"""Metrics that an author reduced, in a custom reducer or ``evaluate_full_dataset``; the state of custom reducers."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from determined import util

from determined_ds.errors import CheckpointError, ConfigError, Problem, TrainingError
from determined_ds.trial.author import described, place_of


class Reducers:
    """All reducers that ``context.wrap_reducer`` has wrapped, with one state."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def state_dict(self) -> list[dict[str, Any]]:
        """The attributes of every reducer, in the order in which they were wrapped."""
        return [_copied_attributes(wrapped.reducer) for wrapped in self._context._wrapped_reducers]

    def load_state_dict(self, state_dict: list[Any]) -> None:
        """Continue from :meth:`state_dict`; checkpoints up to 2026-11 hold a list of such lists, the first is ours."""
        own = state_dict[0] if state_dict and isinstance(state_dict[0], list) else state_dict
        for wrapped, state in zip(self._context._wrapped_reducers, own, strict=False):
            vars(wrapped.reducer).update(copy.deepcopy(state))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """At the end they have the values of the beginning, also where that is an error."""
        state = self.state_dict()
        try:
            yield
        finally:
            self.load_state_dict(state)


def _copied_attributes(reducer: Any) -> dict[str, Any]:
    """A copy of a reducer's attributes; not of ``fn``, the function of a simple reducer.

    Raises:
        CheckpointError: names the one that cannot be copied.
    """
    copies, kind = {}, type(reducer)
    for name, value in vars(reducer).items():
        if name == "fn":
            continue
        try:
            copies[name] = copy.deepcopy(value)
        except Exception as error:  # whatever an object's own methods raise
            place = place_of(kind)
            raise CheckpointError(
                f"{kind.__name__}{f' ({place})' if place else ''}: the attribute {name!r} of this reducer is "
                f"{described(value)}, which cannot be copied ({error}); a validation and a checkpoint copy its values\n"
                f"  fix: hold it in an attribute of the class, not of the object: {name} = ... under class "
                f"{kind.__name__}"
            ) from error
    return copies


def plain(metrics: Mapping[str, Any], source: str, *, for_training: bool = False) -> dict[str, Any]:
    """Metrics as numbers, strings, lists and dicts, which a master takes and JSON can hold.

    Args:
        metrics: Name -> value; tensors and arrays may be in it at any depth.
        source: What made them, for messages.
        for_training: Of training, where a master takes null.

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


def plain_reduced(metrics: Mapping[str, Any], reducers: list[Any], *, for_training: bool) -> dict[str, Any]:
    """The metrics of the custom reducers that a context has wrapped, as :func:`plain` makes them."""
    found = {}
    for name, value in metrics.items():
        found.update(plain({name: value}, _reducer_of(name, reducers), for_training=for_training))
    return found


def _reducer_of(metric: str, reducers: list[Any]) -> str:
    """The reducer of a metric, for messages; one without a name may report any."""
    named_first = sorted(reducers, key=lambda each: each.name is None)
    found = next(each.reducer for each in named_first if each.name in (metric, None))
    function = getattr(found, "fn", None)
    return f"reducer {getattr(function, '__name__', None) or type(found).__name__}"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
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
    if name not in metrics:
        known = ", ".join(sorted(metrics))
        message, fix = f"the trial reports {known}", f"name one of them: {known}"
    elif util.is_numerical_scalar(metrics[name]):
        return float(metrics[name])
    else:
        kind = type(trial).__name__
        message = f"{kind} reports {described(metrics[name])} by this name, and a search compares numbers"
        fix = "name a metric that is a number, or report one besides, such as its mean"
    raise ConfigError(
        Problem(key="searcher.metric", value=name, message=message, fix=fix, code="searcher-metric")
    )


def is_same(first: Any, second: Any, *, tolerance: float) -> bool:
    """Whether plain metrics are equal; numbers up to a relative difference, with 0 to the last bit."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            is_same(first[key], second[key], tolerance=tolerance) for key in first
        )
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(is_same(*pair, tolerance=tolerance) for pair in pairs)
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=tolerance)
    return bool(first == second)
