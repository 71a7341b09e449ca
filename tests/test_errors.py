"""What a user is told: every problem at once, each with key, value, origin, message and fix."""

from __future__ import annotations

import inspect
import pickle

from determined_ds import errors
from determined_ds.errors import ConfigError, DeterminedDSError, EntrypointError, Problem

FULL = Problem(
    key="hyperparameters.global_batch_size",
    value=9,
    origin="const.yaml:14",
    message="is not a multiple of 2",
    fix="use 8 or 10",
)


def test_a_config_error_exits_2_and_any_other_1() -> None:
    members = [value for value in vars(errors).values() if inspect.isclass(value)]
    for error in (value for value in members if issubclass(value, DeterminedDSError)):
        assert error.exit_code == (2 if issubclass(error, ConfigError) else 1)


def test_all_that_is_known_of_every_problem_is_shown_in_order_also_in_another_process() -> None:
    said = "hyperparameters.global_batch_size = 9 (const.yaml:14): is not a multiple of 2\n  fix: use 8 or 10"
    other = Problem(key="a", value=None, message="must be a number")
    error = EntrypointError([FULL, other, Problem(key="entrypoint", message="missing")])
    assert str(error) == f"{said}\na = null: must be a number\nentrypoint: missing"
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), arrived.problems) == (EntrypointError, str(error), error.problems)


def test_a_long_value_is_cut() -> None:
    assert len(str(Problem(key="a", value="x" * 10_000, message="wrong"))) < 150
