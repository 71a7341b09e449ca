"""What could be faster: each finding with what was seen, what it could save at most, and what to try.

Each rule of :mod:`~determined_ds.profile.causes` looks at one cause. What costs less than :data:`LEAST_SHARE` of a
step is not mentioned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Of a step: below it, a step varies by more than a change would gain.
LEAST_SHARE = 0.03


@dataclass(frozen=True, kw_only=True)
class LostTime:
    """Something that costs time.

    Args:
        code: Of the cause, e.g. ``slow-loader``.
        seen: What was seen, in a sentence with numbers.
        saves_s: What could be saved of a mean step, at most.
        share: The same, of the step.
        fix: What to try, by the keys to set.
        figures: The numbers that it is based upon.
    """

    code: str
    seen: str
    saves_s: float
    share: float
    fix: str
    figures: Mapping[str, float] = field(default_factory=dict)
