"""The harness itself: a rank that fails says so, and the next test does not hear of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ranks
from tests.ranks import Ranks, RanksFailed


@pytest.fixture
def own_ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Two ranks apart from those that other tests share."""
    own = Ranks(2, tmp_path)
    yield own
    own.stop()


def rank() -> int:
    return int(os.environ["RANK"])


def place(offset: int) -> tuple[int, str, int]:
    os.environ["LEFT_BEHIND"] = os.environ.get("LEFT_BEHIND", "") + "x"
    return rank() + offset, os.environ["LEFT_BEHIND"], os.getpid()


def raise_on_rank_1() -> None:
    if rank() == 1:
        print("last words", flush=True)
        raise ValueError("rank 1 cannot")
    time.sleep(600)


def exit_on_rank_0() -> None:
    if rank() == 0:
        os._exit(3)


def hang() -> None:
    time.sleep(600)


def return_what_does_not_pickle() -> object:
    return sys._getframe()


def test_results_come_in_the_order_of_ranks_and_processes_stay(own_ranks: Ranks) -> None:
    first, again = own_ranks.run(place, 5), own_ranks.run(place, 5)
    assert [number for number, _, _ in first] == [5, 6]
    assert again == first, "the same processes, and an environment as new"


def test_a_failure_is_told_in_the_ranks_own_words_and_the_next_call_has_new_ranks(
    own_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    before = own_ranks.run(place, 0)
    with pytest.raises(RanksFailed, match="ValueError: rank 1 cannot") as raised:
        own_ranks.run(raise_on_rank_1)
    assert "rank 0: has not ended" in str(raised.value)
    assert "last words" in str(raised.value)
    after = own_ranks.run(place, 0)
    assert {pid for _, _, pid in after}.isdisjoint(pid for _, _, pid in before)


def test_a_rank_that_dies_is_noticed(own_ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="rank 0: its process ended"):
        own_ranks.run(exit_on_rank_0)


def test_a_hang_ends(own_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_S", 1.0)
    with pytest.raises(RanksFailed, match="rank 1: has not ended"):
        own_ranks.run(hang)


def test_a_result_that_does_not_travel_is_a_failure(own_ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        own_ranks.run(return_what_does_not_pickle)
