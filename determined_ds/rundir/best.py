"""Which of two validations is better. One that is not finite never is; the first finite one beats it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def as_number(value: Any) -> float | None:
    """A metric as a number, finite or not; None where it is none: a text, a list, a tensor of several numbers."""
    if getattr(value, "size", None) is not None and hasattr(value, "item"):  # of torch or numpy
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # of several numbers
            return None
    return float(value) if isinstance(value, (int, float)) else None


def finite(value: Any) -> float | None:
    """A metric as a number that can be compared; None where it is not finite, or no number."""
    number = as_number(value)
    return number if number is not None and math.isfinite(number) else None


def is_better(value: Any, best: Any, *, smaller_is_better: bool) -> bool:
    """Whether a validation beats the best one so far.

    Args:
        value: Of the searcher's metric; one that is not finite never is better.
        best: The best so far; None, or not finite, where there is none.
        smaller_is_better: Of that metric.
    """
    now, before = finite(value), finite(best)
    if now is None or before is None:
        return now is not None
    return now < before if smaller_is_better else now > before


def not_finite(metrics: Mapping[str, Any]) -> list[str]:
    """The names of the metrics that are numbers and not finite."""
    numbers = {name: as_number(value) for name, value in metrics.items()}
    return [name for name, number in numbers.items() if number is not None and not math.isfinite(number)]
