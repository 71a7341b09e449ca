"""Latency and bandwidth of a collective from its times, and what is typical of a list of them. Loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def latency_and_slope(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The line latency + slope x size that is nearest to times, each error relative to its time.

    So that a time of microseconds counts as much as one of seconds. Neither is negative, and the slope is above 0: a
    call on sizes without end takes time without end.

    Args:
        sizes: In bytes, above 0.
        seconds: As many, above 0.

    Returns:
        Seconds, and seconds a byte.
    """
    pairs = list(zip(sizes, seconds, strict=True))
    # With u = 1/t and v = x/t, the least squares of (a u + b v - 1).
    uu, vv, uv = (sum(w / t**2 for w, t in _products(pairs, each)) for each in ("uu", "vv", "uv"))
    u, v = sum(1 / t for _, t in pairs), sum(x / t for x, t in pairs)
    determinant = uu * vv - uv * uv
    if len(pairs) > 1 and determinant > 1e-12 * uu * vv:
        latency, slope = (u * vv - v * uv) / determinant, (uu * v - uv * u) / determinant
        if latency >= 0 and slope > 0:
            return latency, slope
        if latency >= 0:  # larger ones took no longer: their time is the latency's
            largest, longest = max(pairs)
            return u / uu, longest / largest
    return 0.0, v / vv


def _products(pairs: Sequence[tuple[float, float]], which: str) -> list[tuple[float, float]]:
    weights = {"uu": lambda x: 1.0, "vv": lambda x: x * x, "uv": lambda x: x}
    return [(weights[which](x), t) for x, t in pairs]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of a single value that value.

    Args:
        values: One or more.
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high
