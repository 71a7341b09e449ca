"""``det-ds search`` draws, stops and replaces the trials that an independent searcher does (``searchers.py``)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from determined_ds.search.methods import Create, make_search
from tests.cluster.configs import as_go
from tests.cluster.searchers import Searcher, Wanted
from tests.search.test_methods import space_of

HYPERPARAMETERS = {
    "optimizer": {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -1, "count": 3}, "name": "adam"},
    "batch": {"type": "categorical", "vals": [4, 8, 16]},
    "width": {"type": "int", "minval": 1, "maxval": 9, "count": 4},
    "drop": {"type": "double", "minval": 0, "maxval": 1, "count": 2},
}
ASHA = {"metric": "loss", "time_metric": "batches", "divisor": 2, "max_trials": 13, "max_time": 16}
ADAPTIVE = {**ASHA, "name": "adaptive_asha"}
SEARCHERS: dict[str, dict[str, Any]] = {
    "single": {},
    "random": {"max_trials": 7, "max_concurrent_trials": 3},
    "grid": {"max_concurrent_trials": 5},
    "grid, all at once": {"name": "grid", "max_concurrent_trials": 0},
    "async_halving": {**ASHA, "num_rungs": 3, "max_concurrent_trials": 4},
    "async_halving, as many as it likes": {
        **ASHA,
        "name": "async_halving",
        "num_rungs": 3,
        "max_concurrent_trials": 0,
        "smaller_is_better": False,
    },
    "adaptive_asha": {**ASHA, "mode": "standard", "max_rungs": 5, "max_concurrent_trials": 16},
    "conservative": {
        **ASHA,
        "name": "adaptive_asha",
        "mode": "conservative",
        "max_rungs": 3,
        "max_concurrent_trials": 0,
    },
    "stated": {
        **ASHA,
        "name": "adaptive_asha",
        "mode": "aggressive",
        "max_rungs": 5,
        "bracket_rungs": [1, 3],
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SEARCHERS)
def test_both_search_alike(name: str, seed: int) -> None:
    """Whatever the trials report, in whatever order, and however they end."""
    draw = random.Random(f"{name} {seed}")
    searcher = {"name": name, **SEARCHERS[name]}
    config: dict[str, Any] = {
        "searcher": searcher,
        "hyperparameters": HYPERPARAMETERS,
        "reproducibility": {"experiment_seed": seed},
    }
    ours = make_search(searcher, space_of(HYPERPARAMETERS, searcher["name"], seed))
    theirs = Searcher(config)
    trained: dict[int, int] = {}
    running: list[int] = []
    todo: tuple[list[Any], list[Any]] = (ours.start(), theirs.start())
    for _ in range(400):
        assert [_plain(action) for action in todo[0]] == [_plain(action) for action in todo[1]]
        stopped = []
        for own, other in zip(*todo, strict=True):
            if isinstance(own, Create):
                number = len(trained) + 1
                ours.created(number, own)
                theirs.created(number, other)
                trained[number] = 0
                running.append(number)
            else:
                stopped.append(other)
        if stopped:
            [trial], end = stopped, None
        elif not running:
            break
        else:
            trial, end = (
                draw.choice(running),
                draw.choice([None] * 12 + ["INVALID_HP", "ERRORED", "CANCELED"]),
            )
            if end is None and trained[trial] < 16:
                trained[trial] += 4
                metrics = {"loss": draw.choice([0.5, 1.0, 2.0, float("nan")]), "batches": trained[trial]}
                todo = (ours.validated(trial, metrics), theirs.validated(trial, metrics))
                continue
        running.remove(trial)
        todo = (ours.exited(trial, end), theirs.exited(trial, end))
    assert not running


def _plain(action: Any) -> Any:
    if isinstance(action, int):
        return action
    if isinstance(action, (Create, Wanted)):
        return _rounded(as_go(action.hparams)), action.seed
    return action.trial_id


def _rounded(value: Any) -> Any:
    """Go's power and C's differ in the last digit."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return round(value, 12) if isinstance(value, float) else value
