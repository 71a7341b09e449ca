"""Numbers as people read them in a narrow space."""

from __future__ import annotations

import math
from collections.abc import Iterable


def in_time(seconds: float) -> str:
    """``41 s``, ``12 min``, ``3 h 05 min``, ``2 d 7 h``."""
    if not math.isfinite(seconds):
        return "?"
    seconds = max(0, round(seconds))
    if seconds < 120:
        return f"{seconds} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest:02} min"
    return f"{hours // 24} d {hours % 24} h"


def number(value: float) -> str:
    """Four significant digits; thousands grouped."""
    if math.isfinite(value) and (
        1000 <= abs(value) < 1e7 or (value and value == int(value) and abs(value) < 1e7)
    ):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def rate(value: float, unit: str) -> str:
    """``164 samples/s``."""
    return f"{value:,.{0 if value >= 100 else 1}f} {unit}/s"


def span(least: float, most: float, unit: str) -> str:
    """``0.68..0.71 GiB``; one number where both read the same."""
    low, high = f"{least:.3g}", f"{most:.3g}"
    return f"{high} {unit}" if low == high else f"{low}..{high} {unit}"


def joined(parts: Iterable[str], between: str = ", ") -> str:
    """Those that are not empty."""
    return between.join(part for part in parts if part)
