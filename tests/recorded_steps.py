"""What every profile must hold, of whatever was trained."""

from __future__ import annotations

import statistics

import pytest

from determined_ds.profile.step_parts import Profile


def assert_adds_up(profile: Profile) -> None:
    """Parts of recorded steps against the clock of the loop: the median, as a rank may be put off between the two."""
    ratios = [
        step.total_s / step.clock_s
        for rank in profile.ranks
        for step in rank.steps
        if step.clock_s is not None
    ]
    assert len(ratios) == sum(len(rank.steps) for rank in profile.ranks)
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
