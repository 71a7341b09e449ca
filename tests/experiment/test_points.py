"""The points that a search visits are those that a master visits: a grid's as it lays them out, others as it draws."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.package import ENTRYPOINT, experiment, points, schema_problems


def config(hyperparameters: dict[str, Any], searcher: str = "grid", seed: int = 0) -> dict[str, Any]:
    return {
        "entrypoint": ENTRYPOINT,
        "hyperparameters": hyperparameters,
        "searcher": {"name": searcher, "metric": "validation_loss"},
        "reproducibility": {"experiment_seed": seed},
    }


def ranged(kind: str, low: Any, high: Any, **more: Any) -> dict[str, Any]:
    return {"type": kind, "minval": low, "maxval": high, **more}


def choice(*values: Any) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        # Those of master/pkg/searcher/grid_test.go and of the documentation's page on grids.
        (ranged("int", 0, 10, count=5), [0, 3, 5, 8, 10]),
        (ranged("int", -5, 0, count=3), [-5, -3, 0]),  # -2.5 is rounded away from 0
        (ranged("log", -5, -3, count=3, base=10), [1e-5, 1e-4, 1e-3]),
        (choice("b", "a", {"c": 1}), ["b", "a", {"c": 1}]),
        # The master sends JSON, and its JSON has 8 for 8.0: a trial takes it for a size.
        (ranged("double", 8, 16, count=2), [8, 16]),
    ],
)
def test_a_grid_takes_these_values_of_a_hyperparameter(spec: dict[str, Any], values: list[Any]) -> None:
    found = [point["h"] for point in points(config({"h": spec}))]
    assert found == [pytest.approx(value) if isinstance(value, float) else value for value in values]
    assert [type(each) for each in found] == [type(value) for value in values]


def test_a_grid_is_laid_out_by_name_the_last_fastest() -> None:
    """`FlattenHPs` and `Each` sort by name, mapping by mapping; the text's own order does not matter."""
    nested = choice(1, 2)
    space = {"z": nested, "a": {"y": nested, "b": nested}, "lists": [nested], "fixed": {"x": {}}}
    found = points(config(space))
    values = [(point["a"]["b"], point["a"]["y"], point["z"]) for point in found]
    assert values == list(itertools.product([1, 2], repeat=3))
    assert found[1] == {"z": 2, "a": {"y": 1, "b": 1}, "lists": [nested], "fixed": {"x": {}}}


# Learning rates of the first three trials of a search with experiment_seed 0 on a master of Determined 0.38.1, whose
# {type: log, base: 10, minval: -3.5, maxval: -2.0} is all that is drawn. Go's power may differ in the last digit.
OBSERVED = [0.00210484565828905, 0.005900347745614208, 0.0068811258559188316]


def test_the_first_points_are_those_that_a_master_drew() -> None:
    space = {"lr": ranged("log", -3.5, -2.0, base=10)}
    drawn = [point["lr"] for point in points(config(space, "adaptive_asha"))[:3]]
    assert drawn == pytest.approx(OBSERVED, rel=1e-14)


@given(st.integers(0, 2**32 - 1))
def test_a_trial_takes_its_numbers_from_numpys_generator(seed: int) -> None:
    """One for each hyperparameter, by name, and five words for its id and its own seed."""
    space = {"b": choice("x", "y", "z"), "a": ranged("double", -1, 1), "c": 3, "d": ranged("int", 3, 9)}
    theirs = np.random.RandomState(seed)
    for point in points(config({**space, "of one nothing is drawn": choice(1)}, "random", seed))[:20]:
        assert (point["a"], point["b"]) == (-1 + 2 * theirs.random_sample(), "xyz"[theirs.randint(3)])
        assert point["d"] == theirs.randint(3, 9 + 1)
        theirs.bytes(20)
    words = np.random.RandomState(seed).randint(0, 2**32, size=5, dtype=np.uint32)
    assert experiment(config({}, "single", seed)).trial_seed == int(words[4]) % 2**31


def test_without_a_search_the_middle_is_taken() -> None:
    """At the top, and nested; what the master would take is taken."""
    middles = [(ranged("int", 1, 8), 4), (ranged("log", -4, -2, base=10), pytest.approx(1e-3))]
    constants = [({"type": "const", "val": {"type": "AdamW"}}, {"type": "AdamW"})]
    constants += [([{"type": "linear"}], [{"type": "linear"}])]  # a list hides a type
    for spec, point in middles + constants:
        read = experiment(config({"h": spec, "nested": {"deeper": spec, "own": 1}}, "single"))
        assert read.hyperparameters.data == {"h": point, "nested": {"deeper": point, "own": 1}}
        assert len(read.searched) == 2 * (point in [each for _, each in middles])
        assert schema_problems(read.config)[0] == []
