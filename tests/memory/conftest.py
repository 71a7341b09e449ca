"""New ranks: where the C library has room that other tests left, it does not ask the system for what it gives."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="module", autouse=True)
def _new_ranks(one_rank: Ranks, two_ranks: Ranks) -> None:
    """The first test of a file that asks for ranks gets new ones; those that nobody asks for are never started."""
    one_rank.stop()
    two_ranks.stop()
