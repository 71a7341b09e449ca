"""Which validation, and so which checkpoint, is the best, and which checkpoints a limit deletes. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from determined_ds.checkpoints.files import Checkpoint

T = TypeVar("T")


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
    """Whether a validation beats the best one so far. One that is not finite never does, and the first finite one does.

    Args:
        value: Of the searcher's metric.
        best: The best so far; None where there is none.
        smaller_is_better: Of that metric.
    """
    now, before = finite(value), finite(best)
    if now is None or before is None:
        return now is not None
    return now < before if smaller_is_better else now > before


def not_finite(metrics: Mapping[str, Any]) -> list[str]:
    """The names of the metrics that are numbers and not finite."""
    return [name for name, value in metrics.items() if as_number(value) is not None and finite(value) is None]


def best_of(
    checkpoints: Iterable[Checkpoint], values: Mapping[int, float | None], *, smaller_is_better: bool
) -> Checkpoint | None:
    """The checkpoint with the best validation of its batch; of equals the earlier; None where none has a finite one.

    Args:
        checkpoints: Of a run.
        values: Batch -> ``searcher.metric`` of the validation after it.
        smaller_is_better: Of that metric.
    """
    in_order = sorted(checkpoints, key=lambda each: each.steps_completed)
    found = [
        (number, each)
        for each in in_order
        if (number := finite(values.get(each.steps_completed))) is not None
    ]
    choose = min if smaller_is_better else max
    return choose(found, key=lambda pair: pair[0])[1] if found else None


def over_limit(kept: Sequence[T], limit: int | None, best: T | None) -> list[T]:
    """What a limit on the number of checkpoints deletes: the oldest, never the best nor the newest.

    Args:
        kept: The existing ones, the oldest first.
        limit: How many may stay; None: all.
        best: The best of them, if known.
    """
    spare = [each for each in kept[:-1] if each != best]
    return spare[: max(0, len(kept) - limit)] if limit else []
