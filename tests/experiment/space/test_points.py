"""The points that a search visits are those that the master visits."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.documents.document import Document, get_path
from determined_ds.documents.reading import parse_yaml
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.space.master_random import MasterRandom, first_trial_seed
from determined_ds.experiment.space.points import Point, points_of
from determined_ds.experiment.space.space import SearchSpace
from tests.making import ENTRYPOINT, refusal


def experiment(hyperparameters: dict[str, Any], searcher: str = "grid", seed: int = 0) -> Experiment:
    data = {
        "entrypoint": ENTRYPOINT,
        "hyperparameters": hyperparameters,
        "searcher": {"name": searcher, "metric": "validation_loss"},
        "reproducibility": {"experiment_seed": seed},
    }
    return parse_experiment(Document(name="a.yaml", data=data))


def space(hyperparameters: dict[str, Any], searcher: str = "grid", seed: int = 0) -> SearchSpace:
    return experiment(hyperparameters, searcher, seed).space


def grid(**spec: Any) -> list[Any]:
    """The values that a grid takes of one hyperparameter."""
    return [point.values[0] for point in points_of(space({"h": spec}))]


def integer(low: int, high: int, count: int | None = None) -> dict[str, Any]:
    return {"type": "int", "minval": low, "maxval": high, **({"count": count} if count else {})}


# ---------------------------------------------------------------------------------------------------- a grid


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        # Those of master/pkg/searcher/grid_test.go and of the documentation's page on grids.
        ({"type": "int", "minval": 0, "maxval": 2, "count": 3}, [0, 1, 2]),
        ({"type": "int", "minval": 0, "maxval": 2, "count": 100}, [0, 1, 2]),
        ({"type": "int", "minval": 0, "maxval": 10, "count": 5}, [0, 3, 5, 8, 10]),
        ({"type": "int", "minval": -5, "maxval": 0, "count": 3}, [-5, -3, 0]),  # -2.5 is rounded away from 0
        ({"type": "int", "minval": 1, "maxval": 8, "count": 1}, [5]),
        ({"type": "int", "minval": -8, "maxval": -1, "count": 1}, [-5]),
        ({"type": "double", "minval": 0.1, "maxval": 0.5, "count": 3}, [0.1, 0.3, 0.5]),
        ({"type": "double", "minval": 0, "maxval": 1, "count": 1}, [0.5]),
        ({"type": "log", "base": 10, "minval": -5, "maxval": -3, "count": 3}, [1e-5, 1e-4, 1e-3]),
        ({"type": "log", "base": 10, "minval": -4, "maxval": -2, "count": 1}, [1e-3]),
        ({"type": "categorical", "vals": ["b", "a", {"c": 1}]}, ["b", "a", {"c": 1}]),
    ],
)
def test_a_grid_takes_these_values_of_a_hyperparameter(spec: dict[str, Any], values: list[Any]) -> None:
    approximate = spec["type"] in ("double", "log")
    assert grid(**spec) == (pytest.approx(values) if approximate else values)


def test_a_whole_number_of_a_range_comes_as_an_integer() -> None:
    """The master sends JSON, and its JSON has 8 for 8.0: a trial takes it for a size."""
    assert repr(grid(type="double", minval=8, maxval=16, count=2)) == "[8, 16]"
    assert repr(grid(type="log", base=2, minval=2, maxval=3, count=2)) == "[4, 8]"


def test_a_grid_is_laid_out_by_name_the_last_fastest() -> None:
    """`FlattenHPs` and `Each` sort by name, mapping by mapping; the text's own order does not matter."""
    nested = {"type": "categorical", "vals": [1, 2]}
    read = space(
        {"z": nested, "a": {"y": nested, "b": nested}, "lists": [nested], "fixed": {"x": {}, "w": None}}
    )
    assert [axis.name for axis in read.axes] == ["a.b", "a.y", "z"]
    points = list(points_of(read))
    assert [point.values for point in points] == list(itertools.product([1, 2], repeat=3))
    assert points[1].hyperparameters == {
        "z": 2,
        "a": {"y": 1, "b": 1},
        "lists": [nested],
        "fixed": {"x": {}, "w": None},
    }


def test_a_grid_without_a_count_is_told_by_its_ends() -> None:
    """That the count is missing is told elsewhere."""
    read = points_of(space({"a": integer(1, 5), "b": {"type": "double", "minval": 0.25, "maxval": 1.5}}))
    assert not read.exact
    assert {point.values[0] for point in read if not point.drawn} == {1, 5}


def test_of_a_large_grid_a_sample_and_the_corners_are_taken() -> None:
    read = space({"a": integer(1, 10**6, 10**6), "b": integer(1, 10**14, 10**14), "c": integer(0, 1, 2)})
    assert read.size == 2 * 10**20
    points = points_of(read, grid_sample=50)
    listed = list(points)
    assert not points.exact
    assert len(points) == len(listed) == 58
    assert {point.values for point in listed if not point.drawn} == set(
        itertools.product([1, 10**6], [1, 10**14], [0, 1])
    )
    assert len({point.values for point in listed}) == 58
    assert list(points_of(read, grid_sample=50)) == listed
    assert list(points_of(read, grid_sample=50, seed=1)) != listed
    assert len(points_of(read, limit=100, grid_sample=10, most_corners=4)) == 10 + 2


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "int", "minval": 1, "maxval": 2, "count": 0},
        {"type": "int", "minval": 1, "maxval": 2, "count": "3"},
        {"type": "double", "minval": 1, "maxval": 2, "count": True},
        {"type": "log", "minval": 1, "maxval": 400, "base": 10},
        {"type": "double", "minval": -1.7e308, "maxval": 1.7e308},
    ],
)
def test_what_gives_no_numbers_is_refused(spec: dict[str, Any]) -> None:
    assert refusal(lambda: space({"h": spec})).code == "hyperparameter-spec"


# ------------------------------------------------------------------------------------------------- any space

NUMBERS = st.integers(-20, 20)
RANGES = st.builds(
    lambda kind, low, width, count, base: {
        "type": kind,
        "minval": low,
        "maxval": low + width,
        "count": count,
        **({"base": base} if kind == "log" else {}),
    },
    st.sampled_from(["int", "double", "log"]),
    NUMBERS,
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([2, 10, 0.5]),
)
LISTS = st.builds(
    lambda values: {"type": "categorical", "vals": values},
    st.lists(st.sampled_from([1, 2.5, "a", None, True, [1], {"b": 2}]), min_size=1, max_size=3),
)
VALUES = RANGES | LISTS | st.sampled_from([3, "x", [1], {"type": "const", "val": {"type": "k"}}, {}])
SPACES = st.dictionaries(
    st.sampled_from("abcd"),
    VALUES | st.dictionaries(st.sampled_from("pq"), VALUES, max_size=2),
    max_size=4,
)
SEARCHERS = st.sampled_from(["grid", "random", "adaptive_asha", "single"])


def within(value: Any, spec: dict[str, Any]) -> bool:
    if spec["type"] == "categorical":
        return any(value is one for one in spec["vals"])
    low, high = spec["minval"], spec["maxval"]
    if spec["type"] == "log":
        low, high = sorted((spec["base"] ** low, spec["base"] ** high))
    return bool(low * (1 - 1e-12) <= value <= high * (1 + 1e-12) or low <= value <= high)


@given(SPACES, SEARCHERS, st.integers(0, 2**32 - 1))
def test_every_point_is_one_of_the_space(hyperparameters: dict[str, Any], searcher: str, seed: int) -> None:
    read = space(hyperparameters, searcher, seed)
    points = points_of(read, limit=60, sample=5, grid_sample=20)
    listed = list(points)
    assert len(listed) == len(points)
    if points.exact:
        assert len(listed) == read.size
    assert points.exact == (read.size is not None and read.size <= 60)
    for point in listed:
        for axis, value in zip(read.axes, point.values, strict=True):
            assert within(value, get_path(hyperparameters, axis.path))
            assert get_path(point.hyperparameters, axis.path) is value
            assert axis.kind != "int" or type(value) is int
    assert list(points_of(read, limit=60, sample=5, grid_sample=20)) == listed


@given(SPACES, SEARCHERS)
def test_each_corner_of_each_axis_is_looked_at(hyperparameters: dict[str, Any], searcher: str) -> None:
    read = space(hyperparameters, searcher)
    for most in (3, 1000):
        seen = list(points_of(read, limit=1, most_corners=most))
        for index, axis in enumerate(read.axes):
            assert all(any(point.values[index] == corner for point in seen) for corner in axis.corners)


@given(SPACES, SEARCHERS)
def test_points_share_what_they_have_in_common_and_nobody_sees_it(
    hyperparameters: dict[str, Any], searcher: str
) -> None:
    before = copy.deepcopy(hyperparameters)
    read = space(hyperparameters, searcher)
    points = list(points_of(read, limit=40, sample=5))
    alone = [read.at(point.values) for point in points]
    assert [point.hyperparameters for point in points] == alone
    assert hyperparameters == before
    for key, value in read.constants.items():
        if all(axis.path[0] != key for axis in read.axes):
            assert all(point.hyperparameters[key] is value for point in points)


def test_a_point_becomes_a_document_that_knows_its_places() -> None:
    spec = "{type: log, minval: -3, maxval: -2, base: 10}"
    text = f"entrypoint: {ENTRYPOINT}\nhyperparameters:\n  lr: {spec}\n  b: 1\n"
    read = parse_experiment(parse_yaml(text, "a.yaml"))
    document = read.at(read.space.at([0.5]))
    assert (document.get(("lr",)), document.origin(("lr",)), document.key(("lr",))) == (
        0.5,
        "a.yaml:3",
        "hyperparameters.lr",
    )
    assert document.places is read.hyperparameters.places
    assert document.origin(("b",)) == "a.yaml:4"


# ----------------------------------------------------------------------------------- what the master draws


@given(st.integers(0, 2**32 - 1))
def test_the_generator_is_numpys(seed: int) -> None:
    """`nprand.go` says that it reproduces it."""
    ours, theirs = MasterRandom(seed), np.random.RandomState(seed)
    for _ in range(700):
        assert ours.uniform(0, 1) == theirs.random_sample()
    ours.create()
    theirs.bytes(20)
    assert ours.uniform(2, 5) == 2 + 3 * theirs.random_sample()


def test_a_trial_gets_the_request_id_and_the_seed_that_a_master_gave_it() -> None:
    """Seen in the database of a master of Determined 0.38.1: experiment_seed 0, all hyperparameters constant."""
    assert MasterRandom(0).create() == ("ac0a7f8c-2faa-4497-b5a6-16b7c0cc21d8", 441365315)
    assert first_trial_seed(0) == 441365315


@given(st.integers(0, 2**32 - 1))
def test_a_seed_is_the_fifth_word_of_numpys_generator(seed: int) -> None:
    words = np.random.RandomState(seed).randint(0, 2**32, size=5, dtype=np.uint32)
    assert first_trial_seed(seed) == int(words[4]) % 2**31


@given(st.integers(1, 2**40), st.integers(0, 10))
def test_integers_are_drawn_below_a_count(count: int, seed: int) -> None:
    source = MasterRandom(seed)
    assert all(0 <= source.below(count) < count for _ in range(20))
    assert {source.below(3) for _ in range(100)} == {0, 1, 2}
    assert source.below(1) == 0


def test_a_sample_begins_with_the_trials_that_the_search_will_create() -> None:
    """Each takes a number for each hyperparameter, by name, and five words for its id and its own seed."""
    unit = {"type": "double", "minval": 0.0, "maxval": 1.0}
    read = space(
        {"b": {"type": "double", "minval": -1.0, "maxval": 1.0}, "a": unit, "c": 3}, "random", seed=7
    )
    theirs = np.random.RandomState(7)
    for point in itertools.islice(points_of(read), 20):
        assert point.values == (theirs.random_sample(), -1 + 2 * theirs.random_sample())
        theirs.bytes(20)


def test_the_last_number_of_a_range_is_not_drawn() -> None:
    unit = {"type": "double", "minval": 0.0, "maxval": 1.0}
    ends = [point.values[0] for point in points_of(space({"a": unit}, "random")) if not point.drawn]
    assert ends == [0, np.nextafter(1.0, 0.0)]
    both = [point.values[0] for point in points_of(space({"a": integer(1, 3)}, "random"))]
    assert both == [1, 2, 3]


def test_without_a_search_there_is_one_point() -> None:
    assert list(points_of(space({"a": 1}, "single"))) == [Point((), {"a": 1})]
