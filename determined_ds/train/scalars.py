"""Metrics as scalars of TensorBoard, under the names that they have everywhere: ``training/loss``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined_ds.checkpoints.retention import as_number


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
