"""Ranks that have held DeepSpeed's buckets at full size are too large to start data-loader workers from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="module", autouse=True)
def _new_ranks_afterwards(one_rank: Ranks, two_ranks: Ranks) -> Iterator[None]:
    """The next test that asks for ranks gets new ones; those that nobody asked for were never started."""
    yield
    one_rank.stop()
    two_ranks.stop()
