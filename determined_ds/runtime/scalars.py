"""Metrics as scalars of TensorBoard, under the names that they have everywhere: ``training/loss``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from determined_ds.protocol.best import as_number


def write_scalars(writer: Any, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
    """Write the metrics that are numbers.

    Args:
        writer: Has ``add_scalar(name, value, step)``.
        group: ``training`` or ``validation``.
        steps_completed: Batches trained.
        metrics: As they were reported.
    """
    for name, value in metrics.items():
        number = as_number(value)
        if number is not None:
            writer.add_scalar(f"{group}/{name}", number, steps_completed)


def write_batches(
    writer: Any, group: str, steps_completed: int, batch_metrics: Sequence[Mapping[str, Any]]
) -> None:
    """Write the metrics of single batches, of which the last one is the last that was trained."""
    first = steps_completed - len(batch_metrics)
    for number, metrics in enumerate(batch_metrics, start=1):
        write_scalars(writer, group, first + number, metrics)
