"""Measured numbers in words: sizes in binary units, rates in decimal ones, as the field writes them."""

from __future__ import annotations

from collections.abc import Sequence

from determined_ds.report.formatting import number

DIGITS = 3


def size(num_bytes: float) -> str:
    """``64 MiB``; of elements that do not fill a unit ``0.977 KiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= 0.9 * unit:
            whole = num_bytes / unit
            return f"{whole:.0f} {name}" if whole == round(whole) else f"{number(whole, DIGITS)} {name}"
    return f"{num_bytes:.0f} B"


def milliseconds(seconds: float | None) -> str:
    """``0.183 ms``, without the unit."""
    return "–" if seconds is None else number(1000 * seconds, DIGITS)


def rate(per_s: float | None, unit: str = "B") -> str:
    """``1.43 GB/s``; ``90.2 GFLOP/s`` with that unit."""
    if per_s is None:
        return "–"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_s >= factor:
            return f"{number(per_s / factor, DIGITS)} {prefix}{unit}/s"
    return f"{number(per_s, DIGITS)} {unit}/s"


def signed_percent(share: float) -> str:
    """``+1.2 %``."""
    return f"{100 * share:+.1f} %"


def aligned(rows: Sequence[Sequence[str]], left: int = 0, gap: int = 2) -> list[str]:
    """Rows as lines with columns as wide as their widest cell.

    Args:
        rows: As many cells each.
        left: How many columns begin at the left; numbers end at the right.
        gap: Between columns.
    """
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        (" " * gap)
        .join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]
