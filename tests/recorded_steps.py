"""What every profile must hold, of whatever was trained."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest


def assert_adds_up(profile: Any) -> None:
    """Parts of recorded steps against the clock of the loop: the median, as a rank may be put off between the two.

    Args:
        profile: What ``tests.package.profile_of`` returns, or the package's own.
    """
    content = profile if isinstance(profile, dict) else dataclasses.asdict(profile)
    steps = [step for rank in content["ranks"] for step in rank["steps"]]
    ratios = [sum(step["seconds"].values()) / step["clock_s"] for step in steps]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
