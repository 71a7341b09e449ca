"""Fewer points of a curve, without losing what one looks for: its highest and lowest, and where it is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence


def thinned(values: Sequence[float], most: int) -> list[int]:
    """The points to draw of a long curve.

    The curve is cut into parts of equal length; of each part the lowest and the highest point stay, and the first one
    that is not finite. So do the curve's first and last point.

    Args:
        values: Of the curve, in their order.
        most: About how many points to keep, at least 4.

    Returns:
        Their indexes, rising; all of them where they are no more than ``most``.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    parts = max(1, (most - 2) // 2)
    kept = {0, count - 1}
    for part in range(parts):
        kept.update(_extremes(values, part * count // parts, (part + 1) * count // parts))
    return sorted(kept)


def _extremes(values: Sequence[float], start: int, end: int) -> list[int]:
    part = values[start:end]
    if all(map(math.isfinite, part)):
        return [start + part.index(min(part)), start + part.index(max(part))]
    finite = [index for index in range(start, end) if math.isfinite(values[index])]
    odd = [index for index in range(start, end) if not math.isfinite(values[index])][:1]
    return [*odd, min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)] if finite else odd
