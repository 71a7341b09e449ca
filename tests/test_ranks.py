"""The harness itself: a rank that fails says so, and the next test does not hear of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import ranks
from tests.ranks import Ranks, RanksFailed


@pytest.fixture
def own_ranks(tmp_path: Path) -> Ranks:
    """Two ranks with a log of their own."""
    return Ranks(2, tmp_path)


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


def leave_a_process() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def test_results_come_in_the_order_of_ranks_and_every_call_has_new_ones(own_ranks: Ranks) -> None:
    first, again = own_ranks.run(place, 5), own_ranks.run(place, 5)
    assert [(number, left) for number, left, _ in first] == [(5, "x"), (6, "x")]
    assert [(number, left) for number, left, _ in again] == [(5, "x"), (6, "x")]
    assert {pid for _, _, pid in first}.isdisjoint(pid for _, _, pid in again)


def test_no_process_of_a_call_is_left(own_ranks: Ranks) -> None:
    deadline = time.monotonic() + 10
    for pid in own_ranks.run(leave_a_process):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"left running: {pid}"
            time.sleep(0.02)


def test_a_failure_is_told_in_the_ranks_own_words(own_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    with pytest.raises(RanksFailed, match="ValueError: rank 1 cannot") as raised:
        own_ranks.run(raise_on_rank_1)
    assert "rank 0: has not ended" in str(raised.value)
    assert "last words" in str(raised.value)


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
