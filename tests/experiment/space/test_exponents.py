"""Bounds of a ``log`` hyperparameter are exponents; where they look like values, both are said."""

from __future__ import annotations

import pytest

from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import load_experiment, parse_experiment
from determined_ds.experiment.space.exponents import exponents, exponents_in
from tests.making import ENTRYPOINT, EXPERIMENTS


def warned(name: str, low: float, high: float, base: float = 10) -> list[Problem]:
    spec = f"{{type: log, minval: {low}, maxval: {high}, base: {base}}}"
    text = f"entrypoint: {ENTRYPOINT}\nhyperparameters:\n  {name}: {spec}"
    experiment = parse_experiment(parse_yaml(text, "x.yaml"))
    return exponents(experiment.space.axes, experiment.document)


@pytest.mark.parametrize(
    ("name", "low", "high", "base", "drawn", "meant"),
    [
        ("learning_rate", 0.0001, 0.01, 10, "from 1.00023 to 1.02329", "0.0001 to 0.01 write their exponents: minval"),
        ("width", 0.0001, 0.01, 10, "from 1.00023 to 1.02329", "minval: -4, maxval: -2"),
        ("learning_rate", 0.0001, 1, 10, "from 1.00023 to 10", "minval: -4, maxval: 0"),
        ("weight_decay", 2, 4, 10, "from 100 to 10000", "0.0001 to 0.01 write minval: -4, maxval: -2"),
        ("lr", 1, 3, 2, "from 2 to 8", "0.125 to 0.5 write minval: -3, maxval: -1"),
        ("lr", -4, 2, 10, "from 0.0001 to 100", "minval: -4 and maxval: -2 are 0.0001 and 0.01"),
    ],
)  # fmt: skip
def test_bounds_that_look_like_values(
    name: str, low: float, high: float, base: float, drawn: str, meant: str
) -> None:
    (warning,) = warned(name, low, high, base)
    assert (warning.key, warning.origin) == (f"hyperparameters.{name}", "x.yaml:3")
    assert drawn in warning.message
    assert meant in warning.fix


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("learning_rate", -4, -2),
        ("learning_rate", -3, 0),
        ("width", 2, 4),
        ("width", 0, 1),
        ("sample_rate", 3, 5),
    ],
)
def test_bounds_that_are_exponents(name: str, low: float, high: float) -> None:
    assert warned(name, low, high) == []


def test_a_trial_on_a_cluster_hears_of_the_search_that_it_is_a_point_of() -> None:
    """The web UI's form takes exponents, and its users write values."""
    spec = {"type": "log", "minval": 0.0001, "maxval": 0.01, "base": 10, "count": None}
    [warning] = exponents_in({"hyperparameters": {"lr": spec, "width": 8}, "searcher": {"name": "random"}})
    assert (warning.key, warning.code) == ("hyperparameters.lr", "log-bounds")
    assert exponents_in({}) == exponents_in({"hyperparameters": None}) == []


def test_the_templates_write_exponents() -> None:
    for path in EXPERIMENTS:
        experiment = load_experiment(path)
        assert exponents(experiment.space.axes, experiment.document) == [], path
