"""The search methods draw, stop and promote as Determined's own tests say that a master does.

``cluster/test_recorded.py`` compares decisions with those of a real master.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.package import SearchMethod

ASHA = {"name": "async_halving", "metric": "loss", "time_metric": "batches", "smaller_is_better": True}
ADAPTIVE = {**ASHA, "name": "adaptive_asha", "bracket_rungs": [], "mode": "standard", "max_rungs": 5}
LR = {"lr": {"type": "log", "minval": -3, "maxval": -1, "base": 10}, "width": 64}
UNIT = {"type": "double", "minval": 0.0, "maxval": 1.0}


def points(searcher: dict[str, Any], hyperparameters: dict[str, Any], seed: int = 0) -> list[tuple[Any, int]]:
    """The trials that a search begins with: hyperparameters and seed."""
    return [(given, drawn) for _, given, drawn in SearchMethod(searcher, hyperparameters, seed).start()]


def simulate(
    searcher: dict[str, Any], loss_of: Callable[[int], float], every: int, longest: int
) -> dict[int, int]:
    """Run a search whose trials validate every so many batches. Returns the batches that each trained."""
    method = SearchMethod(searcher, LR)
    trained: dict[int, int] = {}
    running: list[int] = []
    told = method.start()
    while told or running:
        for _ in (action for action in told if action[0] == "create"):
            running.append(len(trained) + 1)
            trained[running[-1]] = 0
        if not running:
            break
        trial = running.pop(0)
        trained[trial] += every
        told = method.validated(trial, {"loss": loss_of(trial), "batches": trained[trial]})
        if ("stop", trial) in told or trained[trial] >= longest:
            told += method.exited(trial)
        else:
            running.append(trial)
    return trained


# ------------------------------------------------------------------------------------------------ points


def test_a_grid_is_every_combination_from_its_end_and_nested_ones_are_axes() -> None:
    """An axis of integers has no more values than there are integers."""
    space = {
        "b": {"type": "int", "minval": 1, "maxval": 3, "count": 9},
        "a": {"x": {"type": "categorical", "vals": ["p", "q"]}, "y": 7},
        "c": {"type": "log", "minval": -2, "maxval": 0, "base": 10, "count": 2},
    }
    found = [given for given, _ in points({"name": "grid"}, space)]
    assert len(found) == 2 * 3 * 2
    assert found[-1] == {"a": {"x": "p", "y": 7}, "b": 1, "c": pytest.approx(0.01)}
    assert found[-2] == {"a": {"x": "p", "y": 7}, "b": 1, "c": 1}
    assert found[0] == {"a": {"x": "q", "y": 7}, "b": 3, "c": 1}


@pytest.mark.parametrize(
    "searcher",
    [
        {"name": "single"},
        {"name": "random", "max_trials": 8},
        {**ASHA, "divisor": 2, "num_rungs": 3, "max_trials": 8, "max_time": 8, "max_concurrent_trials": 8},
        {**ADAPTIVE, "divisor": 2, "max_trials": 8, "max_time": 8, "max_concurrent_trials": 8},
    ],
    ids=lambda searcher: str(searcher["name"]),
)
def test_points_and_seeds_are_those_that_a_master_draws(searcher: dict[str, Any]) -> None:
    """For each trial: its hyperparameters by name, 16 bytes for the request id, a word below 2**31 for the seed."""
    numpys = np.random.RandomState(3)
    trials = points(searcher, {"b": UNIT, "a": UNIT, "fixed": 7}, seed=3)
    for found in trials:
        hyperparameters = {"a": numpys.random_sample(), "b": numpys.random_sample(), "fixed": 7}
        numpys.bytes(16)
        assert found == (hyperparameters, int(numpys.bytes(4)[::-1].hex(), 16) % 2**31)
    assert len(trials) == {"single": 1, "adaptive_asha": 6}.get(searcher["name"], 8)


def test_a_grid_draws_nothing_but_seeds_and_they_are_those_that_were_seen_on_a_master() -> None:
    words = np.random.RandomState(3).randint(0, 2**32, size=15, dtype=np.uint32)
    grid_of_three = {"a": {"type": "categorical", "vals": [1, 2, 3]}, "fixed": 7}
    seeds = [seed for _, seed in points({"name": "grid"}, grid_of_three, seed=3)]
    assert seeds == [int(word) % 2**31 for word in words[4::5]]
    assert points({"name": "single"}, {"width": 64}) == [({"width": 64}, 441365315)]


# ----------------------------------------------------------------------------------------------- methods


def test_an_impossible_point_is_replaced_by_another_in_a_random_search_alone() -> None:
    single = SearchMethod({"name": "single"}, LR)
    assert len(single.start()) == 1
    assert single.exited(1, "INVALID_HP") == []
    method = SearchMethod({"name": "random", "max_trials": 3, "max_concurrent_trials": 3}, LR)
    first = method.start()
    [another] = method.exited(2, "INVALID_HP")
    assert another[0] == "create"
    assert another not in first


@pytest.mark.parametrize(
    ("at_once", "loss_of", "expected"),
    [
        (2, float, {1: 9000, **dict.fromkeys(range(2, 13), 1000)}),
        (1, lambda trial: -float(trial), dict.fromkeys(range(1, 13), 9000)),
    ],
    ids=["each worse than the last", "each better than the last"],
)
def test_async_halving_promotes_what_is_among_the_best_third(
    at_once: int, loss_of: Callable[[int], float], expected: dict[int, int]
) -> None:
    """As in Determined's own test: 12 trials, rungs at 1000, 3000 and 9000."""
    searcher = {**ASHA, "divisor": 3, "num_rungs": 3, "max_trials": 12, "max_time": 9000}
    searcher["max_concurrent_trials"] = at_once
    assert simulate(searcher, loss_of, every=1000, longest=9000) == expected


@given(st.integers(1, 40), st.sampled_from([2, 3, 4]), st.integers(0, 5), st.integers(0, 2**31))
def test_an_adaptive_search_ends_with_as_many_trials_as_asked(
    max_trials: int, divisor: int, at_once: int, luck: int
) -> None:
    """Each of its brackets, of which there are three at most here, has one trial at least."""
    searcher = {**ADAPTIVE, "max_trials": max_trials, "divisor": divisor, "max_time": 64}
    searcher["max_concurrent_trials"] = at_once
    source = random.Random(luck)
    trained = simulate(searcher, lambda trial: source.random(), every=4, longest=64)
    assert max_trials <= len(trained) <= max(max_trials, 3)
    assert max(trained.values()) == 64
