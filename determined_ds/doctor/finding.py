"""What a probe found, in words for people and in a form for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK = "ok"
WARNING = "warning"  # it runs, and may not do so well, or not for long
MISSING = "missing"  # it does not run
UNKNOWN = "unknown"  # it could not be found out here
STATES = (OK, WARNING, MISSING, UNKNOWN)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        name: Stable, for programs, e.g. ``nvcc``.
        state: One of :data:`STATES`.
        found: What there is.
        needed: What there should be, and for what; "" where nothing is asked for.
        fix: What to do; "" where there is nothing to do.
    """

    name: str
    state: str
    found: str
    needed: str = ""
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)
