"""Ranks for the tests that need them; see ``ranks.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


def _ranks(size: int, factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(size, factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """A rank alone: a process of its own, since joining a process group changes the process that does."""
    yield from _ranks(1, tmp_path_factory)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, started once a session."""
    yield from _ranks(2, tmp_path_factory)
