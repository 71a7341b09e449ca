"""What an author does after each optimizer step: ``on_step_end`` of the trial and of callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from determined import util

from determined_ds.callbacks import Callback
from determined_ds.trial.base import ReconciledTrial

HOOK = "on_step_end"


class StepEnd:
    """Calls ``on_step_end(batch_idx, metrics)``.

    Args:
        trial: The trial.
        callbacks: Its callbacks; those that have the method are called, after the trial.
    """

    def __init__(self, trial: Any, callbacks: Sequence[Any]) -> None:
        owners = [callback for callback in callbacks if callable(getattr(callback, HOOK, None))]
        if isinstance(trial, ReconciledTrial) and util.is_overridden(trial.on_step_end, ReconciledTrial):
            owners.insert(0, trial)
        self._hooks = [getattr(owner, HOOK) for owner in owners]
        self._taken: list[dict[str, Any]] = []

    def take(self, metrics: dict[str, Any]) -> None:
        """Keep the metrics of a micro-batch."""
        if self._hooks:
            self._taken.append(metrics)

    def call(self, batch_idx: int) -> None:
        """After a step.

        Args:
            batch_idx: The step, from 0.
        """
        if not self._hooks:
            return
        metrics, self._taken = mean_of(self._taken), []
        for hook in self._hooks:
            hook(batch_idx, metrics)


def attach(callbacks: Sequence[Any], engines: Sequence[Any]) -> None:
    """Introduce the engines to the callbacks that are of this library's kind."""
    for callback in callbacks:
        if isinstance(callback, Callback):
            callback.attach(engines)


def mean_of(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each metric over micro-batches; nothing is read from a device."""
    if len(found) == 1:
        return {name: _detached(value) for name, value in found[0].items()}
    columns: dict[str, list[Any]] = {}
    for metrics in found:
        for name, value in metrics.items():
            columns.setdefault(name, []).append(_detached(value))
    return {name: sum(values[1:], values[0]) / len(values) for name, values in columns.items()}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
