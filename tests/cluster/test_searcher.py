"""The search methods, by the cases that Determined's own tests name and by their invariants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.searcher import (
    AdaptiveAsha,
    AsyncHalving,
    Create,
    GridSearch,
    RandomSearch,
    Search,
    Stop,
    brackets_of,
    grid,
    sample,
)

ASHA = {"metric": "loss", "time_metric": "batches", "smaller_is_better": True}
ADAPTIVE = {**ASHA, "bracket_rungs": [], "mode": "standard", "max_rungs": 5}
SPACE = {"lr": {"type": "log", "minval": -3, "maxval": -1, "base": 10}, "width": 64}


def simulate(search: Search, loss_of: Callable[[int], float], every: int, longest: int) -> dict[int, int]:
    """Run a search whose trials validate every so many batches. Returns the batches that each trained."""
    trained: dict[int, int] = {}
    waiting = [action for action in search.start() if isinstance(action, Create)]
    running: list[int] = []
    while waiting or running:
        while waiting:
            number = len(trained) + 1
            search.created(number, waiting.pop(0))
            trained[number] = 0
            running.append(number)
        trial = running.pop(0)
        trained[trial] += every
        told = search.validated(trial, {"loss": loss_of(trial), "batches": trained[trial]})
        if Stop(trial_id=trial) in told or trained[trial] >= longest:
            told += search.exited(trial)
        else:
            running.append(trial)
        waiting += [action for action in told if isinstance(action, Create)]
    return trained


def test_a_grid_is_every_combination_and_nested_ones_are_axes() -> None:
    space = {
        "b": {"type": "int", "minval": 1, "maxval": 3, "count": 3},
        "a": {"x": {"type": "categorical", "vals": ["p", "q"]}, "y": 7},
        "c": {"type": "log", "minval": -2, "maxval": 0, "base": 10, "count": 2},
    }
    points = grid(space)
    assert len(points) == 2 * 3 * 2
    assert points[0] == {"a": {"x": "p", "y": 7}, "b": 1, "c": pytest.approx(0.01)}
    assert points[-1] == {"a": {"x": "q", "y": 7}, "b": 3, "c": 1}


def test_an_int_axis_has_no_more_values_than_there_are_integers() -> None:
    assert [p["n"] for p in grid({"n": {"type": "int", "minval": 1, "maxval": 2, "count": 9}})] == [1, 2]


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(5, 9))
def test_a_sample_is_within_its_bounds(seed: int, low: int, high: int) -> None:
    import random

    space: dict[str, Any] = {
        "n": {"type": "int", "minval": low, "maxval": high},
        "x": {"deep": {"type": "double", "minval": low, "maxval": high}},
        "c": {"type": "const", "val": {"type": "AdamW"}},
    }
    point = sample(space, random.Random(seed))
    assert low <= point["n"] <= high
    assert low <= point["x"]["deep"] <= high
    assert point["c"] == {"type": "AdamW"}


def test_a_grid_is_walked_some_at_a_time_and_drops_impossible_points() -> None:
    space = {"n": {"type": "categorical", "vals": [1, 2, 3]}}
    search = GridSearch({"name": "grid", "max_concurrent_trials": 2}, space, 0)
    first = search.start()
    assert [action.hparams["n"] for action in first if isinstance(action, Create)] == [3, 2]
    [last] = search.exited(1, "INVALID_HP")
    assert isinstance(last, Create)
    assert last.hparams["n"] == 1
    assert search.exited(2) == search.exited(3) == []


def test_a_random_search_replaces_impossible_points() -> None:
    search = RandomSearch({"name": "random", "max_trials": 2, "max_concurrent_trials": 1}, SPACE, 0)
    assert len(search.start()) == 1
    assert len(search.exited(1, "INVALID_HP")) == 1
    assert len(search.exited(2)) == 1
    assert search.exited(3) == []


def test_a_single_trial_is_not_replaced() -> None:
    search = RandomSearch({"name": "single"}, SPACE, 0)
    assert len(search.start()) == 1
    assert search.exited(1, "INVALID_HP") == []


def test_async_halving_promotes_only_the_first_where_each_is_worse_than_the_last() -> None:
    """As in Determined's own test: 12 trials, rungs at 1000, 3000 and 9000."""
    config = {**ASHA, "divisor": 3, "num_rungs": 3, "max_trials": 12, "max_time": 9000}
    search = AsyncHalving({**config, "max_concurrent_trials": 2}, SPACE, 0)
    assert [rung.needed for rung in search.rungs] == [1000, 3000, 9000]
    trained = simulate(search, float, every=1000, longest=9000)
    assert trained == {1: 9000, **dict.fromkeys(range(2, 13), 1000)}


def test_async_halving_promotes_all_where_each_is_better_than_the_last() -> None:
    config = {**ASHA, "divisor": 3, "num_rungs": 3, "max_trials": 12, "max_time": 9000}
    search = AsyncHalving({**config, "max_concurrent_trials": 1}, SPACE, 0)
    trained = simulate(search, lambda trial: -float(trial), every=1000, longest=9000)
    assert trained == dict.fromkeys(range(1, 13), 9000)


def test_async_halving_forgets_impossible_points() -> None:
    config = {**ASHA, "divisor": 2, "num_rungs": 2, "max_trials": 1, "max_time": 8}
    search = AsyncHalving({**config, "max_concurrent_trials": 1}, SPACE, 0)
    [create] = search.start()
    assert isinstance(create, Create)
    search.created(1, create)
    search.validated(1, {"loss": 1.0, "batches": 4})
    assert search.rungs[0].metrics
    [again] = search.exited(1, "INVALID_HP")
    assert isinstance(again, Create)
    assert not search.rungs[0].metrics


@pytest.mark.parametrize(
    ("max_trials", "divisor", "rungs", "trials"),
    [
        (20, 3, [3, 2, 1], [12, 5, 3]),
        (50, 3, [4, 3], [35, 15]),
        (50, 4, [3, 2], [37, 13]),
        (100, 4, [4, 3, 2], [70, 22, 8]),
    ],
)
def test_brackets_share_the_trials(
    max_trials: int, divisor: int, rungs: list[int], trials: list[int]
) -> None:
    """The numbers are Determined's: ``TestBracketMaxTrials``."""
    config = {**ADAPTIVE, "max_trials": max_trials, "divisor": divisor, "max_time": 1000}
    found = brackets_of({**config, "bracket_rungs": rungs})
    assert [bracket["max_trials"] for bracket in found] == trials


@given(st.integers(1, 40), st.sampled_from([2, 3, 4]), st.integers(0, 5), st.randoms())
def test_an_adaptive_search_ends_with_as_many_trials_as_asked(
    max_trials: int, divisor: int, at_once: int, random: Any
) -> None:
    config = {**ADAPTIVE, "max_trials": max_trials, "divisor": divisor, "max_time": 64}
    search = AdaptiveAsha({**config, "max_concurrent_trials": at_once}, SPACE, 0)
    trained = simulate(search, lambda trial: random.random(), every=4, longest=64)
    assert len(trained) == max(max_trials, len(search.brackets))
    assert max(trained.values()) == 64
