"""``fit.profile``: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.config.hyperparameters import parse_hyperparameters, read_hyperparameters
from determined_ds.config.profiled_steps import ProfiledSteps
from tests.making import hyperparameters

LENGTH = {"max_length": {"batches": 20}}


def read(profile: Any, fit: dict[str, Any] = LENGTH) -> ProfiledSteps | None:
    return parse_hyperparameters(hyperparameters({"fit": {**fit, "profile": profile}})).fit.profile


def test_what_is_read() -> None:
    assert read(None) is None
    assert read({}) == ProfiledSteps(wait=5, warmup=2, active=3)
    assert read({"wait": 0, "warmup": 0, "active": 20}) == ProfiledSteps(wait=0, warmup=0, active=20)
    assert read({"wait": 90}, {"max_length": {"epochs": 1}}) == ProfiledSteps(wait=90)


@pytest.mark.parametrize(
    ("profile", "key", "message"),
    [
        (True, "fit.profile", "must be a mapping"),
        ({"skip": 1}, "fit.profile.skip", "unknown key"),
        ({"active": "3"}, "fit.profile.active", "must be an integer"),
        ({"active": 0}, "fit.profile.active", "must be 1 or more"),
        ({"active": 51}, "fit.profile.active", "must be at most 50"),
        ({"wait": -1}, "fit.profile.wait", "must be 0 or more"),
        ({"wait": 16}, "fit.profile", "needs 21 batches (wait + warmup + active), and fit.max_length is 20"),
    ],
)
def test_what_is_refused(profile: Any, key: str, message: str) -> None:
    _, [problem] = read_hyperparameters(hyperparameters({"fit": {**LENGTH, "profile": profile}}))
    assert problem.key == f"hyperparameters.{key}"
    assert message in problem.message
    assert problem.fix
