"""What a probe found, in words for people and in a form for programs."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"  # it runs, perhaps not well or not for long
MISSING = "missing"  # it does not run
UNKNOWN = "unknown"  # it cannot be found out here
STATES = (OK, WARNING, MISSING, UNKNOWN)


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was checked.

    Args:
        name: Stable, for programs, e.g. ``nvcc``.
        state: One of :data:`STATES`.
        found: What there is.
        needed: What there should be, and for what; "" where nothing is needed.
        fix: What to do; "" where there is nothing to do.
    """

    name: str
    state: str
    found: str
    needed: str = ""
    fix: str = ""


def diagnosis(name: str, state: str, found: str, needed: str = "", fix: str = "") -> Diagnosis:
    """A diagnosis whose ``fix`` counts only where something is wrong."""
    return Diagnosis(name, state, found, needed, "" if state == OK else fix)
