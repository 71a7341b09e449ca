"""A curve in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-~=+*#"  # for terminals that cannot show blocks
NOT_FINITE = "!"


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """The values from left to right, each sign the mean of its share of them.

    Args:
        values: In their order; those that are not finite are shown as ``!``.
        width: Signs at most; >= 0.
        levels: Signs for the lowest to the highest value.
    """
    means = _means(values, width)
    finite = [value for value in means if math.isfinite(value)]
    if not means or not finite:
        return NOT_FINITE * len(means)
    low, high = min(finite), max(finite)
    if high == low:
        return "".join(levels[0] if math.isfinite(value) else NOT_FINITE for value in means)
    scale = (len(levels) - 1) / (high - low)
    return "".join(
        levels[round((value - low) * scale)] if math.isfinite(value) else NOT_FINITE for value in means
    )


def _means(values: Sequence[float], width: int) -> list[float]:
    """At most so many numbers; one share that holds a number that is not finite is not."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * index // width for index in range(width + 1)] if width > 0 else []
    return [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]


class Thinned:
    """A curve kept in bounded room: where it is full, pairs of neighbours become their means.

    Args:
        most: Numbers kept at most; even.
    """

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._each = 1  # values that a kept number is the mean of
        self._pending: list[float] = []
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Append a value."""
        self._pending.append(value)
        if len(self._pending) < self._each:
            return
        self.values.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self.values) == self._most:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values = [(first + second) / 2 for first, second in pairs]
            self._each *= 2
