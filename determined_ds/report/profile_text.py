"""What a profile has found, as lines for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from determined_ds.report.formatting import percent
from determined_ds.report.texts import printable

WIDTH = 80


def findings_lines(profile: Mapping[str, Any]) -> list[str]:
    """The findings, the one that could save most first.

    Args:
        profile: Of ``profile.json``.
    """
    if not profile.get("findings"):
        return ["Nothing was found that costs more than 3 % of a step."]
    lines = ["What could be faster, by the time of a step that it could save at most:"]
    for number, finding in enumerate(profile["findings"], 1):
        saves = f"{milliseconds(finding['saves_s'])}, {percent(finding['share'])} of a step"
        lines += ["", f"  {number}. {finding['code']}: {saves}"]
        lines += _wrapped(printable(finding["seen"]), "     ", "     ")
        lines += _wrapped(printable(finding["fix"]), "     try: ", "          ")
    return lines


def milliseconds(seconds: float) -> str:
    """A time of a step: ``3.2 ms``, ``412 ms``, ``2.41 s``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _wrapped(text: str, first: str, further: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=further) or [first]
