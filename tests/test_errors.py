"""What a user is told: every problem at once, each with key, value, origin, message and fix."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from determined_ds import errors
from determined_ds.errors import ConfigError, DataError, DeterminedDSError, EntrypointError, Problem

FULL = Problem(
    key="hyperparameters.global_batch_size",
    value=9,
    origin="const.yaml:14",
    message="is not a multiple of 2",
    fix="use 8 or 10",
)


def raised() -> list[type[DeterminedDSError]]:
    """Every error of the package."""
    members = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [value for value in members if issubclass(value, DeterminedDSError)]


@pytest.mark.parametrize("error", raised())
def test_a_config_error_exits_2_and_any_other_1(error: type[DeterminedDSError]) -> None:
    assert error.exit_code == (errors.EXIT_CONFIG if issubclass(error, ConfigError) else 1)
    assert errors.EXIT_CONFIG == 2


def test_all_that_is_known_of_every_problem_is_shown_in_order() -> None:
    said = "hyperparameters.global_batch_size = 9 (const.yaml:14): is not a multiple of 2\n  fix: use 8 or 10"
    other = Problem(key="a", value=None, message="must be a number")
    error = ConfigError([FULL, other, Problem(key="entrypoint", message="missing")])
    assert str(error) == f"{said}\na = null: must be a number\nentrypoint: missing"
    assert ConfigError(FULL).problems == (FULL,)


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, list(range(10_000)), 10**119],
    ids=["text", "list", "digits"],
)
def test_a_long_value_is_cut(value: object) -> None:
    assert len(str(Problem(key="a", value=value, message="wrong"))) < 150


@pytest.mark.parametrize("travel", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_can_be_sent_to_another_process(travel: object) -> None:
    error = EntrypointError([FULL, Problem(key="entrypoint", message="missing")])
    arrived = travel(error)  # type: ignore[operator]
    assert type(arrived) is EntrypointError
    assert str(arrived) == str(error)
    assert arrived.problems == error.problems


def test_what_a_worker_of_a_data_loader_raised_is_said_again() -> None:
    """torch makes the exception anew from a text that ends with what it said, after the worker's traceback."""
    problem = Problem(key="data.path", value="cat.jpg", message="is no image", fix="remove it")
    text = f"Caught DataError in DataLoader worker process 0.\nOriginal Traceback ...\nDataError: {problem}\n"
    again = DataError(text)
    assert str(again) == str(problem)
    assert "Traceback" not in str(again)
