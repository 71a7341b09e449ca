"""Sections of the YAML: every wrong key at once, with the requirement and a fix; the split; the decay groups."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from determined_ds.errors import ConfigError
from model_defs.bert import data as bert
from model_defs.common import text
from model_defs.common.parameters import decay_groups, generator_of
from model_defs.common.sections import Section, parse_section, section_problems
from model_defs.common.split import overlap_problems, split
from model_defs.dcgan import data as dcgan
from model_defs.drivable_vit import data as drivable_vit
from model_defs.vit import data as vit


class Example(Section):
    path: str | None = Field(None, min_length=1)
    fraction: float = Field(0.1, gt=0, lt=1)
    scale: float | None = Field(None, gt=0, le=1)
    views: int = Field(2, ge=1, le=6)
    size: Literal["tiny", "huge"] | None = "tiny"
    shuffle: bool = False
    names: list[str] | None = Field(None, min_length=2, description="a list of two names")


REQUIREMENTS = {
    "path": ("", "a non-empty string or null", "null"),
    "fraction": (1, "a number between 0 and 1 (exclusive)", "0.1"),
    "scale": (float("nan"), "a number above 0 and at most 1 or null", "null"),
    "views": (True, "a whole number at least 1 and at most 6", "2"),
    "size": ("hge", "one of tiny, huge or null", "huge"),
    "shuffle": (1, "true or false", "false"),
    "names": ([3, 4], "a list of two names", "null"),
}


def test_every_wrong_key_is_reported_with_its_requirement() -> None:
    wrong = {"pth": "x", "zebra": 1} | {name: value for name, (value, *_) in REQUIREMENTS.items()}
    with pytest.raises(ConfigError) as caught:
        parse_section(Example, wrong)
    found = {problem.key: problem for problem in caught.value.problems}
    assert list(found) == [f"data.{name}" for name in wrong]
    assert found["data.pth"].fix == "did you mean data.path?"
    assert "fraction" in found["data.zebra"].fix
    for name, (_, requirement, right) in REQUIREMENTS.items():
        assert found[f"data.{name}"].message == f"must be {requirement}."
        assert found[f"data.{name}"].fix == f"data.{name}: {right}"


def test_hyperparameters_hold_other_keys_too() -> None:
    given = {"views": 3, "global_batch_size": 8}
    assert parse_section(Example, given, section="hyperparameters", closed=False) == Example(views=3)
    assert parse_section(Example, None) == Example()


@pytest.mark.parametrize("kind", [each.DataConfig for each in (bert, text, dcgan, drivable_vit, vit)])
def test_the_section_of_every_model_is_checked(kind: Any) -> None:
    problems = section_problems(kind, {"pth": "x", "path": "", "validation_fraction": 1.0})
    assert [problem.key for problem in problems] == ["data.pth", "data.path", "data.validation_fraction"]
    assert [problem.key for problem in section_problems(kind, ["path"])] == ["data"]


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


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_samples_stay_on_their_side_when_others_come(seed: int | None) -> None:
    names = [f"{number}.txt" for number in range(2000)]
    _, before = split(names[:1000], names[:1000], 0.05, seed=seed)
    _, after = split(names, names, 0.05, seed=seed)
    assert 30 <= len(before) <= 70
    assert before == [name for name in after if int(name.removesuffix(".txt")) < 1000]


def test_another_seed_is_another_split_and_one_name_is_on_one_side() -> None:
    names = [f"{number // 2}" for number in range(200)]
    sides = [split(range(200), names, 0.3, seed=seed) for seed in (None, 0, 1)]
    assert len({tuple(validation) for _, validation in sides}) == 3
    for _, validation in sides:
        assert all((index ^ 1) in validation for index in validation)


@pytest.mark.parametrize(("path", "other"), [(".", "."), (".", "a.txt"), ("a.txt", "."), ("a.txt", "a.txt")])
def test_validation_data_within_the_training_data(tmp_path: Any, path: str, other: str) -> None:
    (problem,) = overlap_problems(str(tmp_path / path), str(tmp_path / other))
    assert problem.key == "data.validation_path"
    assert overlap_problems(str(tmp_path / "a"), str(tmp_path / "b")) == overlap_problems(None, "a") == []


# --- parameters ---


def test_matrices_decay_and_vectors_do_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Embedding(4, 3))
    model[0].weight.requires_grad_(False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        ([names[p] for p in group["params"]], group.get("weight_decay")) for group in decay_groups(model)
    ]
    vectors = ["0.bias", "1.weight", "1.bias"]
    assert groups == [(["2.weight"], None), (vectors, 0.0)]
    assert len(decay_groups(model, ("2.",))) == 1
    # As ZeRO 3 partitions it: a vector with its shape beside it.
    model[2].weight = torch.nn.Parameter(torch.zeros(12))
    model[2].weight.ds_shape = (4, 3)
    assert len(decay_groups(model)) == 2


def test_seed_and_name_decide_a_draw() -> None:
    draws = [
        float(torch.rand(1, generator=generator_of(*of))) for of in ((0, "a"), (0, "a"), (0, "b"), (1, "a"))
    ]
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3
