"""A search that does not fit itself is reported before a trial starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import Found, report_of

ASHA = {"name": "adaptive_asha", "max_trials": 16, "time_metric": "batches", "max_time": 256}
RANDOM = {"name": "random", "max_trials": 2}
RANGE = {"type": "double", "minval": 0, "maxval": 1}


def found(folder: Path, searcher: dict[str, Any], searched: dict[str, Any]) -> list[Found]:
    fit = {"max_length": {"batches": 256}}
    metric = searcher.get("metric", "validation_loss")
    trial = (
        "from determined_ds import DataParallelTrial\n\nclass T(DataParallelTrial):\n"
        f"    validation_metrics = ('{metric}',)\n\n    def evaluate(self, model, batch):\n        return f(batch)\n"
    )
    report = report_of(
        folder, trial=trial, hyperparameters={**searched, "fit": fit}, searcher={"metric": metric, **searcher}
    )
    every: list[Found] = report["findings"]
    return every


@pytest.mark.parametrize(
    ("searcher", "searched"),
    [
        (ASHA, {"dropout": RANGE}),
        ({**ASHA, "metric": "accuracy", "smaller_is_better": False}, {"dropout": RANGE}),
        ({**ASHA, "metric": "accuracy_loss", "smaller_is_better": False}, {"dropout": RANGE}),
        ({"name": "grid"}, {"dropout": {**RANGE, "count": 101}}),
        ({"name": "single"}, {}),
    ],
)
def test_a_search_that_fits_itself_checks_clean(
    tmp_path: Path, searcher: dict[str, Any], searched: dict[str, Any]
) -> None:
    assert found(tmp_path, searcher, searched) == []


@pytest.mark.parametrize(
    ("searcher", "searched", "code", "key", "said"),
    [
        # The space
        ({"name": "grid"}, {}, "search-nothing", "searcher.name", ""),
        (RANDOM, {}, "search-nothing", "searcher.name", ""),
        ({"name": "single"}, {"dropout": RANGE}, "search-single", "searcher.name", "dropout"),
        # The metric
        ({**ASHA, "metric": "val_acc"}, {"a": RANGE}, "search-direction", "searcher.metric", "false"),
        (
            {**ASHA, "smaller_is_better": False},
            {"a": RANGE},
            "search-direction",
            "searcher.smaller_is_better",
            "",
        ),
        ({**ASHA, "time_metric": "tokens"}, {"a": RANGE}, "search-time", "searcher.time_metric", "batches"),
        # Lengths, and trials at once
        ({**ASHA, "max_time": 512}, {"a": RANGE}, "search-length", "searcher.max_time", "max_time to 256"),
        ({**ASHA, "max_time": 128}, {"a": RANGE}, "search-length", "searcher.max_time", "{batches: 128}"),
        (
            {**ASHA, "time_metric": "epochs"},
            {"a": RANGE},
            "search-length",
            "searcher.max_time",
            "time_metric to batches",
        ),
    ],
)
def test_one_that_does_not_is_reported_at_its_key(
    tmp_path: Path, searcher: dict[str, Any], searched: dict[str, Any], code: str, key: str, said: str
) -> None:
    (only,) = found(tmp_path, searcher, searched)
    assert (only.code, only.key) == (code, key)
    assert said in f"{only.message} {only.fix}"


@pytest.mark.parametrize(
    ("name", "low", "high", "base", "drawn", "meant"),
    [
        ("learning_rate", 0.0001, 1, 10, "from 1.00023 to 10", "minval: -4, maxval: 0"),
        ("weight_decay", 2, 4, 10, "from 100 to 10000", "minval: -4, maxval: -2"),
        ("lr", 1, 3, 2, "from 2 to 8", "minval: -3, maxval: -1"),
        ("learning_rate", -4, 2, 10, "from 0.0001 to 100", "exponents of the intended values"),
        ("width", 2, 4, 10, None, None),
    ],
)
def test_bounds_of_a_log_hyperparameter_are_exponents(
    tmp_path: Path, name: str, low: float, high: float, base: float, drawn: str | None, meant: str | None
) -> None:
    spec = {"type": "log", "minval": low, "maxval": high, "base": base}
    odd = [each for each in found(tmp_path, RANDOM, {name: spec}) if each.code == "log-bounds"]
    assert [each.key for each in odd] == ([f"hyperparameters.{name}"] if drawn else [])
    for each in odd:
        assert str(drawn) in each.message
        assert str(meant) in each.fix
