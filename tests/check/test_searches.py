"""A search that does not fit itself is reported before a trial starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import Found, report_of

SINGLE, GRID = {"name": "single"}, {"name": "grid"}
RANDOM = {"name": "random", "max_trials": 2}
ASHA = {"name": "adaptive_asha", "max_trials": 16, "time_metric": "batches", "max_time": 256}
LARGEST = {**ASHA, "smaller_is_better": False}
RANGE = {"dropout": {"type": "double", "minval": 0, "maxval": 1}}


def found(folder: Path, searcher: dict[str, Any], searched: dict[str, Any]) -> list[Found]:
    """What is found in a search whose trials report its metric, and train 256 batches."""
    metric = searcher.get("metric", "validation_loss")
    trial = (
        "from determined_ds import DataParallelTrial\n\nclass T(DataParallelTrial):\n"
        f"    validation_metrics = ('{metric}',)\n\n    def evaluate(self, model, batch):\n        return f(batch)\n"
    )
    hyperparameters = {**searched, "fit": {"max_length": {"batches": 256}}}
    report = report_of(
        folder, trial=trial, hyperparameters=hyperparameters, searcher={"metric": metric, **searcher}
    )
    every: list[Found] = report["findings"]
    return every


FITTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a large metric": ({**LARGEST, "metric": "accuracy"}, RANGE),
    "a metric that may be either": ({**LARGEST, "metric": "accuracy_loss"}, RANGE),
    "a grid": (GRID, {"dropout": {**RANGE["dropout"], "count": 101}}),
    "no search": (SINGLE, {}),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_search_that_fits_itself_checks_clean(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, *FITTING[name]) == []


@pytest.mark.parametrize(
    ("searcher", "searched", "code", "key", "said"),
    [
        (GRID, {}, "search-nothing", "name", ""),
        (RANDOM, {}, "search-nothing", "name", ""),
        (SINGLE, RANGE, "search-single", "name", "dropout"),
        ({**ASHA, "metric": "val_acc"}, RANGE, "search-direction", "metric", "false"),
        (LARGEST, RANGE, "search-direction", "metric", "true"),
        ({**ASHA, "time_metric": "tokens"}, RANGE, "search-time", "time_metric", "batches"),
        ({**ASHA, "max_time": 128}, RANGE, "search-length", "max_time", "{batches: 128}"),
        ({**ASHA, "time_metric": "epochs"}, RANGE, "search-length", "max_time", "time_metric to batches"),
    ],
)
def test_one_that_does_not_is_reported_at_its_key(
    tmp_path: Path, searcher: dict[str, Any], searched: dict[str, Any], code: str, key: str, said: str
) -> None:
    (only,) = found(tmp_path, searcher, searched)
    assert (only.code, only.key) == (code, f"searcher.{key}")
    assert said in f"{only.message} {only.fix}"


def test_bounds_of_a_log_hyperparameter_are_exponents(tmp_path: Path) -> None:
    """No rate is above 1; what else is drawn between 100 and 10000 may be meant so."""
    bounds = {"weight_decay": (2, 4), "learning_rate": (-4, 2), "lr": (-4, -2), "width": (2, 4)}
    axes = {
        name: {"type": "log", "minval": low, "maxval": high, "base": 10}
        for name, (low, high) in bounds.items()
    }
    odd = {each.key: each.message for each in found(tmp_path, RANDOM, axes) if each.code == "log-bounds"}
    assert list(odd) == ["hyperparameters.learning_rate", "hyperparameters.weight_decay"]
    assert [text.partition("values ")[2] for text in odd.values()] == [
        "from 0.0001 to 100 are drawn",
        "from 100 to 10000 are drawn",
    ]
