"""``checkpoint diff`` compares every tensor, however a checkpoint is cut into files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.command import checkpoint
from tests.checkpoints.making import made


def differences(one: Path, other: Path, *options: str) -> list[dict[str, Any]]:
    done = checkpoint("diff", one, other, "--json", *options)
    found = json.loads(done.stdout)
    assert done.exit_code == (1 if found["differences"] else 0)
    assert found["equal"] == (not found["differences"])
    return list(found["differences"])


def between(folder: Path, left: dict[str, Any], right: dict[str, Any], *options: str) -> list[dict[str, Any]]:
    """Where checkpoints of these tensors differ, which two ranks and three have written."""
    return differences(made(folder / "a", left, ranks=2), made(folder / "b", right, ranks=3), *options)


def model() -> dict[str, Any]:
    draw = np.random.default_rng(0).standard_normal
    weight = draw((7, 5))
    return {
        "embedding": {"weight": ("BF16", weight), "fp32": ("F32", weight), "exp_avg": ("F32", draw((7, 5)))},
        "bias": {"weight": ("F16", draw((3,)))},
        "count": {"weight": ("I64", np.array(2**60 + 1))},
        "empty": {"weight": ("F32", np.zeros((0, 4)))},
    }


def single(values: Any, kind: str = "F32") -> dict[str, Any]:
    return {"weight": (kind, np.asarray(values))}


@pytest.mark.parametrize("ranks", [1, 2, 3, 40])
def test_the_same_tensors_are_equal_in_any_cut(tmp_path: Path, ranks: int) -> None:
    one = made(tmp_path / "a", model(), aliases={"head": "embedding"})
    other = made(tmp_path / "b", model(), ranks=ranks, aliases={"head": "embedding"})
    assert differences(one, other) == []


def test_the_element_is_named_with_both_values(tmp_path: Path) -> None:
    """Only the optimizer's copy differs: in bf16 the weight is the same."""
    changed = model()
    copy = changed["embedding"]["fp32"][1].copy()
    copy[4, 1] += 1e-6
    copy[6, 4] += 2.0
    changed["embedding"] |= {"fp32": ("F32", copy), "exp_avg": ("F32", copy)}
    first, second = between(tmp_path, model(), changed)
    assert (first["engine"], first["tensor"], first["state"]) == ("model0", "embedding", "fp32")
    assert first["place"] == [4, 1]
    assert first["values"] == pytest.approx((copy[4, 1] - 1e-6, copy[4, 1]), rel=1e-6)
    assert (first["num_elements"], first["largest"]) == (2, pytest.approx(2.0))
    assert (second["state"], second["num_elements"]) == ("exp_avg", 35)
    weights = differences(tmp_path / "a", tmp_path / "b", "--weights")
    assert [each["state"] for each in weights] == ["fp32"]


def test_integers_beyond_a_float_are_told_apart_and_nan_is_itself(tmp_path: Path) -> None:
    same = {"bias": single([1.0, np.nan, np.inf], "F16")}
    (found,) = between(
        tmp_path, {**same, "count": single(2**60 + 1, "I64")}, {**same, "count": single(2**60, "I64")}
    )
    assert (found["tensor"], found["place"]) == ("count", [])


def test_what_one_lacks_and_what_has_another_form_is_said(tmp_path: Path) -> None:
    left, right = model(), model()
    del right["bias"], right["embedding"]["fp32"]
    right |= {"new": single(np.zeros(2)), "count": single(np.arange(2), "I64")}
    right["embedding"] |= single(left["embedding"]["weight"][1])
    right["embedding"]["exp_avg_sq"] = left["embedding"]["exp_avg"]
    one, other = made(tmp_path / "a", left), made(tmp_path / "b", right)
    made(tmp_path / "c", {}, engine="model1")
    (tmp_path / "c/model1").rename(other / "model1")
    found = [tuple(each[key] for key in ("engine", "tensor", "state")) for each in differences(one, other)]
    assert found == [
        ("model0", "embedding", "weight"),  # of another type
        ("model0", "embedding", "exp_avg_sq"),
        ("model0", "bias", ""),
        ("model0", "count", ""),  # of another shape
        ("model0", "new", ""),
        ("model1", "", ""),
    ]


VALUES = np.random.default_rng(0).standard_normal(9)
COPY = {"fp32": ("F32", VALUES)}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "both": (single(VALUES), single(VALUES) | {"fp32": ("F32", VALUES + 1)}, ["fp32"]),
    "copy alone": (COPY, single(VALUES, "BF16") | COPY, []),
    "copy or weight": (COPY, single(VALUES), []),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizers_copy_and_fp32_weights_stand_for_each_other(tmp_path: Path, form: str) -> None:
    """As where one was trained with ZeRO and the other without; ZeRO 3 keeps the copy alone."""
    one, other, differing = FORMS[form]
    assert [each["state"] for each in between(tmp_path, {"w": one}, {"w": other})] == differing
    again = differences(tmp_path / "b", tmp_path / "a")
    assert [each["state"] for each in again] == differing


def test_a_weight_that_is_tied_in_one_alone_is_compared_by_each_name(tmp_path: Path) -> None:
    values = np.arange(4.0)
    tied = made(tmp_path / "a", {"embedding": single(values)}, aliases={"head": "embedding"})
    apart = made(tmp_path / "b", {"embedding": single(values), "head": single(values + 1)})
    for left, right in ((tied, apart), (apart, tied)):
        (found,) = differences(left, right)
        assert found["num_elements"] == 4


def test_a_tolerance_is_absolute(tmp_path: Path) -> None:
    other = [0, 0.25, 0, 0.5, np.nan]
    (found,) = between(tmp_path, {"w": single(np.zeros(5))}, {"w": single(other)}, "--tolerance", "0.25")
    assert (found["place"], found["num_elements"]) == ([3], 2)
