"""A search that does not fit itself is reported before a trial starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import Found, report_of

TRIAL = """
from determined_ds import DataParallelTrial

class T(DataParallelTrial):
    validation_metrics = ("validation_loss", "accuracy", "val_acc", "accuracy_loss")
"""
SINGLE, GRID = {"name": "single"}, {"name": "grid"}
RANDOM = {"name": "random", "max_trials": 2}
ASHA = {"name": "adaptive_asha", "max_trials": 16, "time_metric": "batches", "max_time": 64}
LARGEST = {**ASHA, "smaller_is_better": False}
RANGE = {"dropout": {"type": "double", "minval": 0, "maxval": 1, "count": 101}}


def found(folder: Path, searcher: dict[str, Any], searched: dict[str, Any]) -> list[Found]:
    """What is found in a search whose trials report its metric, and train 64 batches."""
    whole = {"metric": "validation_loss", **searcher}
    every: list[Found] = report_of(folder, trial=TRIAL, hyperparameters=searched, searcher=whole)["findings"]
    return every


@pytest.mark.parametrize(
    ("searcher", "searched", "code", "said"),
    [
        (GRID, RANGE, "", ""),
        (SINGLE, {}, "", ""),
        (GRID, {}, "search-nothing name", ""),
        (RANDOM, {}, "search-nothing name", ""),
        (SINGLE, RANGE, "search-single name", "dropout"),
        (ASHA, RANGE, "", ""),
        (LARGEST, RANGE, "search-direction metric", "true"),
        ({**LARGEST, "metric": "accuracy"}, RANGE, "", ""),
        ({**ASHA, "metric": "val_acc"}, RANGE, "search-direction metric", "false"),
        ({**LARGEST, "metric": "accuracy_loss"}, RANGE, "", ""),  # may be either
        ({**ASHA, "time_metric": "tokens"}, RANGE, "search-time time_metric", "batches"),
        ({**ASHA, "max_time": 32}, RANGE, "search-length max_time", "{batches: 32}"),
        ({**ASHA, "time_metric": "epochs"}, RANGE, "search-length max_time", "time_metric to batches"),
    ],
)
def test_a_search_that_does_not_fit_itself_is_reported_at_its_key(
    tmp_path: Path, searcher: dict[str, Any], searched: dict[str, Any], code: str, said: str
) -> None:
    every = found(tmp_path, searcher, searched)
    assert [f"{each.code} {each.key.removeprefix('searcher.')}" for each in every] == [code] * bool(code)
    assert all(said in f"{each.message} {each.fix}" for each in every)


def test_bounds_of_a_log_hyperparameter_are_exponents(tmp_path: Path) -> None:
    """No rate is above 1; what else is drawn between 100 and 10000 may be meant so."""
    bounds = {"weight_decay": (2, 4), "learning_rate": (-4, 2), "lr": (-4, -2), "width": (2, 4)}
    axes = {
        name: {"type": "log", "minval": low, "maxval": high, "base": 10}
        for name, (low, high) in bounds.items()
    }
    odd = {each.key: each.message for each in found(tmp_path, RANDOM, axes) if each.code == "log-bounds"}
    assert [*odd] == ["hyperparameters.learning_rate", "hyperparameters.weight_decay"]
    assert "from 0.0001 to 100 are drawn" in odd["hyperparameters.learning_rate"]
