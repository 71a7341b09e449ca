"""Metrics of transformers' Trainer under the names that Determined's callback gives them. Loads no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

TRAINING, VALIDATION, TEST = "training", "validation", "test"
PREFIXES = {"eval_": VALIDATION, "test_": TEST}
# Left out, as Determined's callback does: rounded, or of the speed of one evaluation.
SPEEDS = ("_runtime", "_per_second", "_compilation_time")


def group_of(logs: Mapping[str, Any]) -> str:
    """Whether logs are of training, of validation or of a test, by the prefix of any metric."""
    for prefix, group in PREFIXES.items():
        if any(name.startswith(prefix) for name in logs):
            return group
    return TRAINING


def reported(
    logs: Mapping[str, Any], kept: Sequence[str] | None, *, step: int, epoch: float | None
) -> dict[str, Any]:
    """The metrics of logs, and how far training is.

    Args:
        logs: What transformers logs.
        kept: Parts of names; a metric that holds none of them is left out. None: all are kept.
        step: Optimizer steps.
        epoch: Passes over the data.
    """
    found = {
        name: value
        for name, value in logs.items()
        if name != "epoch"
        and not name.endswith(SPEEDS)
        and (kept is None or any(part in name for part in kept))
        and not (name == "grad_norm" and not math.isfinite(value))  # of a step that was skipped
    }
    return {"batches": step, "epochs": epoch} | found


class Stopwatch:
    """Time spent in training steps: without evaluations, checkpoints and reports."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._seconds = 0.0
        self._steps = 0

    def restart(self) -> None:
        """What was done until now is not training."""
        self._since = time.perf_counter()

    def step(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        self._seconds, self._steps, self._since = self._seconds + now - self._since, self._steps + 1, now

    def take(self) -> float | None:
        """Steps per second since the last call; None without a step."""
        seconds, steps = self._seconds, self._steps
        self._seconds, self._steps = 0.0, 0
        return steps / seconds if steps and seconds else None
