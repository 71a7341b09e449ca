"""``det-ds search`` draws, stops and replaces the trials that an independent searcher does (``searchers.py``)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.cluster.configs import as_go
from tests.cluster.searchers import Searcher, Wanted
from tests.harness.master_schemas import fill_defaults
from tests.package import SearchMethod

HYPERPARAMETERS = {
    "optimizer": {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1, "count": 3}, "name": "adam"},
    "batch": {"type": "categorical", "vals": [4, 8, 16]},
    "width": {"type": "int", "minval": 1, "maxval": 9, "count": 4},
    "drop": {"type": "double", "minval": 0, "maxval": 1, "count": 2},
}
ASHA = {"metric": "loss", "time_metric": "batches", "divisor": 2, "max_trials": 13, "max_time": 16}
HALVING = {**ASHA, "name": "async_halving", "num_rungs": 3}
ADAPTIVE = {**ASHA, "name": "adaptive_asha"}
SEARCHERS: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "random": {"name": "random", "max_trials": 7, "max_concurrent_trials": 3},
    "grid": {"name": "grid", "max_concurrent_trials": 5},
    "grid, all at once": {"name": "grid", "max_concurrent_trials": 0},
    "halving": {**HALVING, "max_concurrent_trials": 4},
    "halving, at will": {**HALVING, "max_concurrent_trials": 0, "smaller_is_better": False},
    "adaptive": {**ADAPTIVE, "mode": "standard", "max_rungs": 5, "max_concurrent_trials": 16},
    "conservative": {**ADAPTIVE, "mode": "conservative", "max_rungs": 3, "max_concurrent_trials": 0},
    "stated rungs": {**ADAPTIVE, "mode": "aggressive", "max_rungs": 5, "bracket_rungs": [1, 3]},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SEARCHERS)
def test_both_search_alike(name: str, seed: int) -> None:
    """Whatever the trials report, in whatever order, and however they end."""
    draw = random.Random(f"{name} {seed}")
    searcher = {"metric": "loss", **SEARCHERS[name]}
    complete = fill_defaults({"searcher": searcher, "reproducibility": {"experiment_seed": seed}})
    ours = SearchMethod(searcher, HYPERPARAMETERS, seed)
    theirs = Searcher({**complete, "hyperparameters": HYPERPARAMETERS})
    trained: dict[int, int] = {}
    running: list[int] = []
    own, other = ours.start(), theirs.start()
    for _ in range(400):
        assert [_rounded(action) for action in own] == [_rounded(_plain(action)) for action in other]
        stopped = [action for action in other if isinstance(action, int)]
        for wanted in (action for action in other if isinstance(action, Wanted)):
            running.append(len(trained) + 1)
            theirs.created(running[-1], wanted)
            trained[running[-1]] = 0
        if not (stopped or running):
            break
        trial, end = stopped[0] if stopped else draw.choice(running), None
        if not stopped:
            end = draw.choice([None] * 12 + ["INVALID_HP", "ERRORED", "CANCELED"])
            if end is None and trained[trial] < 16:
                trained[trial] += 4
                metrics = {"loss": draw.choice([0.5, 1.0, 2.0, float("nan")]), "batches": trained[trial]}
                own, other = ours.validated(trial, metrics), theirs.validated(trial, metrics)
                continue
        running.remove(trial)
        own, other = ours.exited(trial, end), theirs.exited(trial, end)
    assert not running


def _plain(action: Wanted | int) -> tuple[Any, ...]:
    return ("create", action.hparams, action.seed) if isinstance(action, Wanted) else ("stop", action)


def _rounded(value: Any) -> Any:
    """Go's power and C's differ in the last digit."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return round(as_go(value), 12) if isinstance(value, float) else value
