"""One case of a campaign."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Case:
    """What was tried, and what was wrong with the answer.

    Args:
        name: What was tried, in a line.
        failures: What was wrong; empty where nothing was.
    """

    name: str
    failures: list[str] = field(default_factory=list)
