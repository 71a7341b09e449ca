"""The search methods, by the cases that Determined's own tests name and by their invariants.

``cluster/test_searchers.py`` holds every decision against that of another searcher.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.documents.document import Document
from determined_ds.documents.values import Findings
from determined_ds.experiment.space.points import points_of
from determined_ds.experiment.space.space import SearchSpace, read_space
from determined_ds.search.methods import (
    Create,
    Search,
    Stop,
    brackets_of,
    grid,
    make_search,
    with_defaults,
)

ASHA = {"name": "async_halving", "metric": "loss", "time_metric": "batches", "smaller_is_better": True}
ADAPTIVE = {**ASHA, "name": "adaptive_asha", "bracket_rungs": [], "mode": "standard", "max_rungs": 5}
SPACE = {"lr": {"type": "log", "minval": -3, "maxval": -1, "base": 10}, "width": 64}


def space_of(hyperparameters: dict[str, Any], searcher: str = "random", seed: int = 0) -> SearchSpace:
    found = Findings(Document(name="config", data={"hyperparameters": hyperparameters}))
    space, _ = read_space(found, hyperparameters, searcher=searcher, seed=seed)
    assert not found.problems
    return space


def search_of(config: dict[str, Any], hyperparameters: dict[str, Any] = SPACE, seed: int = 0) -> Any:
    return make_search(config, space_of(hyperparameters, config["name"], seed))


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


# ------------------------------------------------------------------------------------------------ points


def test_a_grid_is_every_combination_from_its_end_and_nested_ones_are_axes() -> None:
    space = {
        "b": {"type": "int", "minval": 1, "maxval": 3, "count": 3},
        "a": {"x": {"type": "categorical", "vals": ["p", "q"]}, "y": 7},
        "c": {"type": "log", "minval": -2, "maxval": 0, "base": 10, "count": 2},
    }
    points = list(grid(space_of(space, "grid")))
    assert len(points) == 2 * 3 * 2
    assert points[-1] == {"a": {"x": "p", "y": 7}, "b": 1, "c": pytest.approx(0.01)}
    assert points[-2] == {"a": {"x": "p", "y": 7}, "b": 1, "c": 1}
    assert points[0] == {"a": {"x": "q", "y": 7}, "b": 3, "c": 1}


def test_an_int_axis_has_no_more_values_than_there_are_integers() -> None:
    space = space_of({"n": {"type": "int", "minval": 1, "maxval": 2, "count": 9}}, "grid")
    assert [point["n"] for point in grid(space)] == [2, 1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(5, 9))
def test_a_point_is_within_its_bounds(seed: int, low: int, high: int) -> None:
    space: dict[str, Any] = {
        "n": {"type": "int", "minval": low, "maxval": high + 1},
        "x": {"deep": {"type": "double", "minval": low, "maxval": high + 1}},
        "c": {"type": "const", "val": {"type": "AdamW"}},
    }
    [create] = search_of({"name": "single"}, space, seed).start()
    assert low <= create.hparams["n"] <= high + 1
    assert low <= create.hparams["x"]["deep"] <= high + 1
    assert create.hparams["c"] == {"type": "AdamW"}


@pytest.mark.parametrize(
    "config",
    [
        {"name": "random", "max_trials": 8},
        {**ASHA, "divisor": 2, "num_rungs": 3, "max_trials": 8, "max_time": 8, "max_concurrent_trials": 8},
        {**ADAPTIVE, "divisor": 2, "max_trials": 8, "max_time": 8, "max_concurrent_trials": 8},
    ],
    ids=lambda config: str(config["name"]),
)
def test_the_points_are_those_that_the_master_draws(config: dict[str, Any]) -> None:
    """Of one source, in whatever brackets; ``det-ds check`` looks at the same."""
    search = search_of(config, SPACE, seed=7)
    drawn = [action.hparams for action in search.start()]
    assert len(drawn) > 5
    sample = points_of(space_of(SPACE, config["name"], 7), sample=len(drawn))
    assert drawn == [point.hyperparameters for point in sample if point.drawn]


UNIT = {"type": "double", "minval": 0.0, "maxval": 1.0}


@pytest.mark.parametrize(
    "config",
    [
        {"name": "single"},
        {"name": "random", "max_trials": 8},
        {**ASHA, "divisor": 2, "num_rungs": 3, "max_trials": 8, "max_time": 8, "max_concurrent_trials": 8},
        {**ADAPTIVE, "divisor": 2, "max_trials": 8, "max_time": 8, "max_concurrent_trials": 8},
    ],
    ids=lambda config: str(config["name"]),
)
def test_the_seeds_are_those_that_the_master_draws(config: dict[str, Any]) -> None:
    """For each trial: its hyperparameters by name, 16 bytes for the request id, a word below 2**31 for the seed."""
    numpys = np.random.RandomState(3)
    trials = search_of(config, {"b": UNIT, "a": UNIT, "fixed": 7}, seed=3).start()
    for action in trials:
        hparams = {"a": numpys.random_sample(), "b": numpys.random_sample(), "fixed": 7}
        numpys.bytes(16)
        assert (action.hparams, action.seed) == (hparams, int(numpys.bytes(4)[::-1].hex(), 16) % 2**31)
    assert len(trials) == {"single": 1, "adaptive_asha": 6}.get(config["name"], 8)


def test_a_grid_draws_nothing_but_seeds() -> None:
    words = np.random.RandomState(3).randint(0, 2**32, size=15, dtype=np.uint32)
    grid_of_three = {"a": {"type": "categorical", "vals": [1, 2, 3]}, "fixed": 7}
    seeds = [action.seed for action in search_of({"name": "grid"}, grid_of_three, seed=3).start()]
    assert seeds == [int(word) % 2**31 for word in words[4::5]]


def test_the_first_trial_of_constants_has_the_seed_that_was_seen_on_a_master() -> None:
    [first] = search_of({"name": "single"}, {"width": 64}).start()
    assert first.seed == 441365315


def test_what_is_not_said_is_what_the_master_fills_in() -> None:
    given_null = {"name": "adaptive_asha", "divisor": None, "mode": "aggressive", "max_trials": 3}
    filled = with_defaults(given_null)
    assert filled == {
        "name": "adaptive_asha",
        "divisor": 4,
        "mode": "aggressive",
        "max_trials": 3,
        "max_rungs": 5,
        "max_concurrent_trials": 16,
        "smaller_is_better": True,
    }
    assert with_defaults({"name": "random", "max_concurrent_trials": 0})["max_concurrent_trials"] == 0


# ----------------------------------------------------------------------------------------------- methods


def test_a_single_trial_is_not_replaced() -> None:
    search = search_of({"name": "single"})
    assert len(search.start()) == 1
    assert search.exited(1, "INVALID_HP") == []


def test_async_halving_promotes_only_the_first_where_each_is_worse_than_the_last() -> None:
    """As in Determined's own test: 12 trials, rungs at 1000, 3000 and 9000."""
    config = {**ASHA, "divisor": 3, "num_rungs": 3, "max_trials": 12, "max_time": 9000}
    search = search_of({**config, "max_concurrent_trials": 2})
    assert [rung.needed for rung in search.rungs] == [1000, 3000, 9000]
    trained = simulate(search, float, every=1000, longest=9000)
    assert trained == {1: 9000, **dict.fromkeys(range(2, 13), 1000)}


def test_async_halving_promotes_all_where_each_is_better_than_the_last() -> None:
    config = {**ASHA, "divisor": 3, "num_rungs": 3, "max_trials": 12, "max_time": 9000}
    search = search_of({**config, "max_concurrent_trials": 1})
    trained = simulate(search, lambda trial: -float(trial), every=1000, longest=9000)
    assert trained == dict.fromkeys(range(1, 13), 9000)


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


@pytest.mark.parametrize(
    ("at_once", "divisor", "rungs", "max_trials", "expected"),
    [
        (0, 3, [3, 2, 1], 13, [3, 3, 3]),
        (11, 3, [3, 2, 1], 13, [4, 4, 3]),
        (1, 3, [3, 2, 1], 13, [1, 1, 1]),
    ],
)
def test_brackets_share_the_trials_at_once(
    at_once: int, divisor: int, rungs: list[int], max_trials: int, expected: list[int]
) -> None:
    """The first two are of Determined's ``TestBracketMaxConcurrentTrials``."""
    config = {**ADAPTIVE, "max_trials": max_trials, "divisor": divisor, "max_time": 1000}
    found = brackets_of({**config, "bracket_rungs": rungs, "max_concurrent_trials": at_once})
    assert [bracket["max_concurrent_trials"] for bracket in found] == expected


@given(st.integers(1, 40), st.sampled_from([2, 3, 4]), st.integers(0, 5), st.integers(0, 2**31))
def test_an_adaptive_search_ends_with_as_many_trials_as_asked(
    max_trials: int, divisor: int, at_once: int, luck: int
) -> None:
    config = {**ADAPTIVE, "max_trials": max_trials, "divisor": divisor, "max_time": 64}
    search = search_of({**config, "max_concurrent_trials": at_once})
    source = random.Random(luck)
    trained = simulate(search, lambda trial: source.random(), every=4, longest=64)
    assert len(trained) == max(max_trials, len(search.brackets))
    assert max(trained.values()) == 64
