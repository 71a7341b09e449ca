"""A cause of lost time that is planted in a training is found in its traces, before all others.

``python -m tests.campaigns causes`` does this many times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profile.planted import CLEAN, PLANTED, mistakes, profile_of
from tests.ranks import Ranks


@pytest.mark.parametrize("cause", [*PLANTED, CLEAN])
def test_what_is_planted_is_named_first(two_ranks: Ranks, tmp_path: Path, cause: str) -> None:
    assert mistakes(profile_of(two_ranks, tmp_path, cause), cause) == []
