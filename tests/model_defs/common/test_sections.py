"""Sections of the YAML: every wrong key at once, with a fix; the split."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from model_defs.bert import data as bert
from model_defs.common import text
from model_defs.common.files import check_apart, split
from model_defs.common.sections import Section, parse_section
from model_defs.dcgan import data as dcgan
from model_defs.drivable_vit import data as drivable_vit
from model_defs.vit import data as vit
from tests.package import refusal, refusals


class Example(Section):
    path: str | None = Field(None, min_length=1)
    fraction: float = Field(0.1, gt=0, lt=1)
    views: int = Field(2, ge=1, le=6)
    size: Literal["tiny", "huge"] | None = "tiny"
    shuffle: bool = False


def test_every_wrong_key_is_reported_with_a_right_value() -> None:
    wrong = {"pth": "x", "path": "", "fraction": 1, "views": True, "size": "hge", "shuffle": 1}
    found = {problem.key: problem for problem in refusals(lambda: parse_section(Example, wrong))}
    assert list(found) == [f"data.{name}" for name in wrong]
    assert "did you mean path?" in found["data.pth"].fix
    assert "must be less than 1" in found["data.fraction"].message
    assert "'tiny' or 'huge'" in found["data.size"].message
    assert found["data.size"].fix == "data.size: tiny"


@pytest.mark.parametrize("kind", [each.DataConfig for each in (bert, text, dcgan, drivable_vit, vit)])
def test_the_section_of_every_model_is_checked(kind: Any) -> None:
    wrong = {"pth": "x", "path": "", "validation_fraction": 1.0}
    problems = refusals(lambda: parse_section(kind, wrong))
    assert [problem.key for problem in problems] == ["data.pth", "data.path", "data.validation_fraction"]
    assert refusal(lambda: parse_section(kind, ["path"])).key == "data"


# --- the split ---


@given(
    names=st.sets(st.text(), min_size=2, max_size=40),
    fraction=st.floats(0.001, 0.999),
    seed=st.none() | st.just(1),
)
def test_each_side_gets_a_sample(names: set[str], fraction: float, seed: int | None) -> None:
    samples = sorted(names)
    train, validation = split(samples, samples, fraction, seed=seed)
    assert train
    assert validation
    assert sorted(train + validation) == samples
    assert split(samples[:1], samples[:1], fraction) == (samples[:1], [])
    others = [str(number) * 9 for number in range(500)]
    _, after = split(names := [*samples, *others], names, 0.05, seed=seed)
    _, before = split(others, others, 0.05, seed=seed)
    assert [name for name in after if name in set(others)] == before, "they stay where they were"


@pytest.mark.parametrize(("path", "other"), [(".", "a.txt"), ("a.txt", "."), ("a.txt", "a.txt")])
def test_validation_data_within_the_training_data(tmp_path: Any, path: str, other: str) -> None:
    found = refusal(lambda: check_apart(str(tmp_path / path), str(tmp_path / other)))
    assert found.key == "data.validation_path"
    check_apart(str(tmp_path / "a"), str(tmp_path / "b"))
    check_apart(None, "a")
