"""``checkpoint diff`` compares every tensor, however a checkpoint is cut into files; ``verify`` every file."""

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
    assert done.exit_code == (0 if found["equal"] else 1)
    assert found["equal"] == (not found["differences"])
    return list(found["differences"])


def model() -> dict[str, Any]:
    draw = np.random.default_rng(0).standard_normal
    weight = draw((7, 5))
    return {
        "embedding": {"weight": ("BF16", weight), "fp32": ("F32", weight), "exp_avg": ("F32", draw((7, 5)))},
        "bias": {"weight": ("F16", draw((3,)))},
        "count": {"weight": ("I64", np.array(2**60 + 1))},
        "empty": {"weight": ("F32", np.zeros((0, 4)))},
    }


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
    one, other = made(tmp_path / "a", model(), ranks=2), made(tmp_path / "b", changed, ranks=3)
    first, second = differences(one, other)
    assert (first["engine"], first["tensor"], first["state"]) == ("model0", "embedding", "fp32")
    assert first["place"] == [4, 1]
    assert first["values"] == pytest.approx((copy[4, 1] - 1e-6, copy[4, 1]), rel=1e-6)
    assert (first["num_elements"], first["largest"]) == (2, pytest.approx(2.0))
    assert (second["state"], second["num_elements"]) == ("exp_avg", 35)
    assert [each["state"] for each in differences(one, other, "--weights")] == ["fp32"]


def test_integers_beyond_a_float_are_told_apart_and_nan_is_itself(tmp_path: Path) -> None:
    left, right = model(), model()
    right["count"] = {"weight": ("I64", np.array(2**60))}
    for each in (left, right):
        each["bias"] = {"weight": ("F16", np.array([1.0, np.nan, np.inf]))}
    (found,) = differences(made(tmp_path / "a", left), made(tmp_path / "b", right))
    assert (found["tensor"], found["place"]) == ("count", [])


def test_what_one_lacks_and_what_has_another_form_is_said(tmp_path: Path) -> None:
    left, right = model(), model()
    del right["bias"]
    right["new"] = {"weight": ("F32", np.zeros(2))}
    right["count"] = {"weight": ("I64", np.arange(2))}
    right["embedding"] = {
        "weight": ("F32", left["embedding"]["weight"][1]),
        "exp_avg": left["embedding"]["exp_avg"],
        "exp_avg_sq": left["embedding"]["exp_avg"],
    }
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
PLAIN = {"weight": ("F32", VALUES)}
FORMS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (PLAIN, {"weight": ("F32", VALUES), "fp32": ("F32", VALUES + 1)}, ["fp32"]),
    ({"fp32": ("F32", VALUES)}, {"weight": ("BF16", VALUES), "fp32": ("F32", VALUES)}, []),
    ({"fp32": ("F32", VALUES)}, PLAIN, []),
]


@pytest.mark.parametrize(("one", "other", "differing"), FORMS, ids=["both", "copy alone", "copy or weight"])
def test_an_optimizers_copy_and_fp32_weights_stand_for_each_other(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], differing: list[str]
) -> None:
    """As where one was trained with ZeRO and the other without; ZeRO 3 keeps the copy alone."""
    left, right = made(tmp_path / "a", {"w": one}), made(tmp_path / "b", {"w": other})
    assert [each["state"] for each in differences(left, right)] == differing
    assert [each["state"] for each in differences(right, left)] == differing


def test_a_weight_that_is_tied_in_one_alone_is_compared_by_each_name(tmp_path: Path) -> None:
    values = np.arange(4.0)
    tied = made(tmp_path / "a", {"embedding": {"weight": ("F32", values)}}, aliases={"head": "embedding"})
    apart = {"embedding": {"weight": ("F32", values)}, "head": {"weight": ("F32", values + 1)}}
    for left, right in ((tied, made(tmp_path / "b", apart)), (made(tmp_path / "c", apart), tied)):
        (found,) = differences(left, right)
        assert found["num_elements"] == 4


def test_a_tolerance_is_absolute(tmp_path: Path) -> None:
    values = np.zeros(5)
    one = made(tmp_path / "a", {"w": {"weight": ("F32", values)}})
    other = made(tmp_path / "b", {"w": {"weight": ("F32", values + np.array([0, 0.25, 0, 0.5, np.nan]))}})
    (found,) = differences(one, other, "--tolerance", "0.25")
    assert (found["place"], found["num_elements"]) == ([3], 2)


def test_what_ends_too_early_or_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    one, other = made(tmp_path / "a", model()), made(tmp_path / "b", model())
    (other / "model0/rank0.bin").write_bytes(b"header")
    done = checkpoint("diff", one, other)
    assert (done.exit_code, "ends before elements" in done.output) == (1, True)
    assert checkpoint("diff", one, tmp_path).exit_code == 2


# ------------------------------------------------------------------------------------------- verify


def verified(path: Path) -> dict[str, Any]:
    done = checkpoint("verify", path, "--json")
    (found,) = json.loads(done.stdout)["checkpoints"]
    assert done.exit_code == (found["state"] == "damaged")
    return dict(found)


def test_every_damaged_file_is_named_and_what_cannot_be_verified_is_not_called_intact(tmp_path: Path) -> None:
    path = made(tmp_path / "run/checkpoints/a", model(), ranks=3)
    found = verified(path)
    assert (found["state"], found["damages"], found["files"]) == ("intact", [], 4)
    (path / "model0/rank0.bin").unlink()
    torn = path / "model0/rank2.bin"
    torn.write_bytes(torn.read_bytes()[:-1])
    found = verified(path)
    assert [damage.split()[0] for damage in found["damages"]] == ["model0/rank0.bin", "model0/rank2.bin"]
    assert found["state"] == "damaged"
    whole = made(tmp_path / "run/checkpoints/b", model(), steps=9)
    (whole / "manifest.json").unlink()
    assert verified(whole)["state"] == "unverified"
