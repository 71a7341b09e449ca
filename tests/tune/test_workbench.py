"""What compare and autotune share."""

from __future__ import annotations

import pytest

from determined_ds.config.forms import FORMS
from determined_ds.tune.workbench import check_names
from tests.making import refusals


def test_unknown_names_are_all_reported_with_a_guess() -> None:
    names = ["zero1", "zer2", "pipelin", "fsdp"]
    first, second, third = refusals(lambda: check_names("--strategies", names, tuple(FORMS), "strategy"))
    assert [problem.value for problem in (first, second, third)] == ["zer2", "pipelin", "fsdp"]
    assert (first.key, first.code) == ("--strategies", "strategy")
    assert first.fix.startswith("did you mean zero2? use one of pipeline, pipeline_zero1, zero0")
    assert second.fix.startswith("did you mean pipeline? ")
    assert third.fix.startswith("use one of ")


@pytest.mark.parametrize("names", [[], ["zero9"]])
def test_there_must_be_a_known_name(names: list[str]) -> None:
    [problem] = refusals(lambda: check_names("--strategies", names, tuple(FORMS), "strategy"))
    assert problem.code == "strategy"
