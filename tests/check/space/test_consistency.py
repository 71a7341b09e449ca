"""A search that does not fit itself is told before a trial starts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.check.space.consistency import search_problems
from determined_ds.config.fit_options import FitOptions, Length
from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import Problem
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.experiment.space.rungs import brackets, rungs
from tests.making import ENTRYPOINT

ASHA = {"name": "adaptive_asha", "max_trials": 16, "time_metric": "batches", "max_time": 256}
RANGE = {"type": "double", "minval": 0, "maxval": 1}


def length(value: int | tuple[int, ...], unit: str = "batches") -> Length:
    return Length(unit=unit, value=value)


FIT = FitOptions(max_length=length(256), validation_period=length(4))


def told(
    searcher: dict[str, Any],
    fit: FitOptions = FIT,
    *,
    hyperparameters: dict[str, Any] | None = None,
    reported: tuple[str, ...] | None = None,
) -> tuple[list[Problem], list[Problem]]:
    given = {"lr": RANGE} if hyperparameters is None else hyperparameters
    data = {
        "entrypoint": ENTRYPOINT,
        "searcher": {"metric": "validation_loss", **searcher},
        "hyperparameters": given,
    }
    problems, warnings = search_problems(
        parse_experiment(Document(name="a.yaml", data=data)), fit, reported=reported
    )
    for problem in (*problems, *warnings):
        assert problem.message
        assert problem.fix
        assert problem.key
    return problems, warnings


def warning(*args: Any, **kwargs: Any) -> Problem:
    """The only thing that is told."""
    problems, (found,) = told(*args, **kwargs)
    assert problems == []
    return found


@pytest.mark.parametrize(
    "searcher",
    [ASHA, {"name": "random", "max_trials": 8, "max_concurrent_trials": 8}, {**ASHA, "mode": "aggressive"}],
)
def test_a_search_that_fits_itself_is_not_told(searcher: dict[str, Any]) -> None:
    assert told(searcher) == ([], [])


# -------------------------------------------------------------------------------------------------- the space


def test_a_search_with_nothing_to_search() -> None:
    for searcher in ({"name": "grid"}, {"name": "random", "max_trials": 3}, ASHA):
        assert warning(searcher, hyperparameters={"lr": 0.1}).code == "search-nothing"
    problems, warnings = told({"name": "grid"}, hyperparameters={})
    assert [problem.code for problem in problems] == ["search-nothing"]
    assert warnings == []


def test_single_draws_by_chance() -> None:
    found = warning({"name": "single"})
    assert (found.code, found.key, found.value) == ("search-single", "searcher.name", "single")
    assert "lr" in found.message
    assert told({"name": "single"}, hyperparameters={"lr": 0.1}) == ([], [])


LIST = {"type": "categorical", "vals": [1, 2]}


@pytest.mark.parametrize("searcher", [{"name": "random", "max_trials": 2}, ASHA], ids=["random", "asha"])
@pytest.mark.parametrize(
    ("given", "said", "fix"),
    [
        (
            {"m": {"b": LIST, "a": LIST}},
            "m: 2 hyperparameters (a, b)",
            "at most one hyperparameter in a mapping",
        ),
        ({"m": {"b": {"c": LIST}, "a": RANGE, "d": 3}}, "m: 2 hyperparameters (a, b.c)", "at most one"),
        (
            {"overwrite_deepspeed_args": {"gradient_clipping": RANGE, "zero_optimization": {"stage": LIST}}},
            "overwrite_deepspeed_args: 2 hyperparameters (gradient_clipping, zero_optimization.stage)",
            "write hyperparameters.zero_stage instead",
        ),
    ],
)
def test_a_mapping_in_which_several_are_searched_is_drawn_in_no_certain_order(
    searcher: dict[str, Any], given: dict[str, Any], said: str, fix: str
) -> None:
    """Two creations of one search on one master gave other points."""
    found = next(each for each in told(searcher, hyperparameters=given)[1] if each.code == "search-order")
    name, _, count = said.partition(": ")
    numbered, _, inside = count.partition(" hyperparameters ")
    assert found.key == f"hyperparameters.{name}"
    assert found.message.startswith(f"{numbered} hyperparameters are searched in one mapping {inside}")
    assert fix in found.fix


@pytest.mark.parametrize(
    ("searcher", "given"),
    [
        ({"name": "random", "max_trials": 2}, {"m": {"b": LIST, "c": 3}, "n": {"a": LIST}, "lr": RANGE}),
        ({"name": "random", "max_trials": 2}, {"m": {"b": LIST, "a": {"type": "categorical", "vals": [3]}}}),
        ({"name": "grid"}, {"m": {"b": LIST, "a": LIST}}),
    ],
    ids=["one each", "one of them drawn", "grid"],
)
def test_a_mapping_in_which_one_is_drawn_has_an_order(
    searcher: dict[str, Any], given: dict[str, Any]
) -> None:
    assert told(searcher, hyperparameters=given) == ([], [])


def test_more_trials_than_points() -> None:
    few = {"a": {"type": "categorical", "vals": [1, 2]}, "b": {"type": "int", "minval": 1, "maxval": 3}}
    found = warning({"name": "random", "max_trials": 7}, hyperparameters=few)
    assert (found.code, found.key, found.value) == ("search-repeats", "searcher.max_trials", 7)
    assert "6 points" in found.message
    assert told({"name": "random", "max_trials": 6}, hyperparameters=few) == ([], [])


def test_a_grid_has_no_limit() -> None:
    counted = {**RANGE, "count": 101}
    found = warning({"name": "grid"}, hyperparameters={"a": counted, "b": counted})
    assert found.code == "search-grid-size"
    assert "10201 trials" in found.message
    assert told({"name": "grid"}, hyperparameters={"a": counted}) == ([], [])


# ------------------------------------------------------------------------------------------------- the metric


@pytest.mark.parametrize("metric", ["accuracy", "val_acc", "validation_f1", "top1/acc", "eval-auc"])
def test_a_metric_that_should_be_large(metric: str) -> None:
    found = warning({**ASHA, "metric": metric})
    assert (found.code, found.key, found.value) == ("search-direction", "searcher.metric", metric)
    assert found.fix == "add smaller_is_better: false"
    for stated in (True, False):
        assert told({**ASHA, "metric": metric, "smaller_is_better": stated}) == ([], [])


def test_a_metric_that_should_be_small() -> None:
    found = warning({**ASHA, "smaller_is_better": False})
    assert (found.code, found.key) == ("search-direction", "searcher.smaller_is_better")
    assert told({**ASHA, "metric": "accuracy_loss", "smaller_is_better": False}) == ([], [])


def test_the_time_has_to_be_reported() -> None:
    """The master fails at a validation without it. Metrics of the trial's own will do."""
    tokens = {**ASHA, "time_metric": "tokens"}
    assert warning(tokens).code == "search-time"
    problems, warnings = told(tokens, reported=("validation_loss",))
    assert [(problem.code, problem.key, problem.fix) for problem in problems] == [
        ("search-time", "searcher.time_metric", "write batches")
    ]
    assert warnings == []
    assert told(tokens, reported=("validation_loss", "tokens")) == ([], [])


# ------------------------------------------------------------------------------------------------- the lengths


@pytest.mark.parametrize(
    ("max_time", "unit", "said", "fix"),
    [
        (512, "batches", "no trial reaches the last rung", "set searcher.max_time to 256"),
        (128, "batches", "stopped early", "max_time to 256, or fit.max_length to {batches: 128}"),
        (256, "epochs", "the two cannot be compared", "time_metric to batches and searcher.max_time to 256"),
    ],
)
def test_a_trial_is_as_long_as_its_search(max_time: int, unit: str, said: str, fix: str) -> None:
    found = warning({**ASHA, "max_time": max_time, "time_metric": unit})
    assert (found.code, found.key, found.value) == ("search-length", "searcher.max_time", max_time)
    assert said in found.message
    assert fix in found.fix
    assert told({**ASHA, "max_time": max_time, "time_metric": unit}, FitOptions()) == ([], [])


@pytest.mark.parametrize(
    ("period", "first"), [(length(50), 50), (length((100, 20)), 20), (None, 256), (length(17), 17)]
)
def test_trials_validate_as_often_as_they_are_judged(period: Length | None, first: int) -> None:
    found = warning(ASHA, FitOptions(max_length=length(256), validation_period=period))
    assert (found.code, found.key) == ("search-validation", "hyperparameters.fit.validation_period")
    assert f"after 16, 64 and 256 batches, and validate after {first} first" in found.message
    assert "{batches: 16}" in found.fix
    left = 2 if first <= 64 else 1
    assert f"searcher.max_rungs to {left}" in found.fix
    searcher = {**ASHA, "max_rungs": left, "mode": "aggressive"}
    again = told(searcher, FitOptions(max_length=length(256), validation_period=period))
    assert [problem.code for problem in again[1]] == (["search-rungs"] if left == 1 else [])


def test_what_cannot_be_compared_is_not() -> None:
    epochs = FitOptions(max_length=length(256), validation_period=length(1, "epochs"))
    assert told(ASHA, epochs) == ([], [])
    assert told(ASHA, FitOptions(max_length=length(256), validation_period=length(16))) == ([], [])


def test_one_rung_stops_nobody() -> None:
    assert warning({**ASHA, "max_trials": 3}).code == "search-rungs"
    assert warning({**ASHA, "name": "async_halving", "num_rungs": 1}).code == "search-rungs"


def test_how_many_trials_run_at_a_time() -> None:
    many = warning({"name": "random", "max_trials": 4, "max_concurrent_trials": 9})
    assert (many.code, many.key, many.value) == ("search-concurrency", "searcher.max_concurrent_trials", 9)
    assert "4 trials" in many.message
    few = warning({**ASHA, "max_concurrent_trials": 1})
    assert "2 brackets" in few.message
    assert told({**ASHA, "max_concurrent_trials": 2}) == ([], [])
    assert told({**ASHA, "max_concurrent_trials": 0}) == ([], [])


# --------------------------------------------------------------------------------------------------- the rungs


@pytest.mark.parametrize(
    ("fields", "sides", "ladder"),
    [
        # Those of master/pkg/searcher/adaptive_asha.go and asha_stopping.go, by hand.
        ({}, (3, 2), (16, 64, 256)),
        ({"mode": "conservative"}, (3, 2, 1), (16, 64, 256)),
        ({"mode": "aggressive"}, (3,), (16, 64, 256)),
        ({"max_trials": 1000}, (5, 4, 3), (1, 4, 16, 64, 256)),
        ({"max_trials": 1000, "max_rungs": 2}, (2, 1), (64, 256)),
        ({"max_trials": 1000, "max_time": 3}, (1,), (3,)),
        ({"divisor": 2, "max_trials": 8}, (4, 3, 2), (32, 64, 128, 256)),
        ({"bracket_rungs": [2, 4]}, (4, 2), (4, 16, 64, 256)),
        ({"bracket_rungs": [], "max_time": 200}, (3, 2), (12, 50, 200)),
        ({"name": "async_halving", "num_rungs": 6}, (6,), (1, 1, 4, 16, 64, 256)),
    ],
)
def test_where_trials_are_judged(
    fields: dict[str, Any], sides: tuple[int, ...], ladder: tuple[int, ...]
) -> None:
    searcher = {**ASHA, **fields}
    assert (brackets(searcher), rungs(searcher)) == (sides, ladder)


ODD = st.sampled_from([None, 0, -1, 1, 2.5, True, "x", [], [1, 2], {}, {"a": 1}, 10**30])
KEYS = st.sampled_from(
    """max_trials max_time time_metric divisor mode max_rungs num_rungs bracket_rungs max_concurrent_trials
    metric""".split()  # noqa: SIM905
)


@given(
    st.sampled_from(["adaptive_asha", "async_halving", "random", "grid", "single"]),
    st.dictionaries(KEYS, ODD),
)
def test_a_field_of_another_type_is_passed_over(name: str, fields: dict[str, Any]) -> None:
    data = {
        "entrypoint": ENTRYPOINT,
        "searcher": {**ASHA, **fields, "name": name},
        "hyperparameters": {"lr": RANGE},
    }
    if not isinstance(fields.get("metric", ""), (str, type(None))):
        return  # told by the experiment
    search_problems(parse_experiment(Document(name="a.yaml", data=data)), FIT)


def test_a_problem_knows_its_line() -> None:
    text = f"entrypoint: {ENTRYPOINT}\nhyperparameters: {{lr: 1}}\nsearcher:\n  name: grid\n"
    _, (found,) = search_problems(parse_experiment(parse_yaml(text, "a.yaml")), FIT)
    assert str(found.origin) == "a.yaml:4"
