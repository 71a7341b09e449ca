"""Two checkpoints are compared tensor by tensor, however each is cut into files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from determined_ds.checkpoint import first_difference
from determined_ds.checkpoint.first_difference import differences
from determined_ds.errors import CheckpointError
from tests.checkpoint.making import made


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
def test_the_same_tensors_are_equal_in_any_cut(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_difference, "CHUNK", 4)
    one = made(tmp_path / "a", model(), aliases={"head": "embedding"})
    other = made(tmp_path / "b", model(), ranks=ranks, aliases={"head": "embedding"})
    assert list(differences(one, other)) == []


def test_the_element_is_named_with_both_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the optimizer's copy differs: in bf16 the weight is the same."""
    monkeypatch.setattr(first_difference, "CHUNK", 4)
    changed = model()
    copy = changed["embedding"]["fp32"][1].copy()
    copy[4, 1] += 1e-6
    copy[6, 4] += 2.0
    changed["embedding"] |= {"fp32": ("F32", copy), "exp_avg": ("F32", copy)}
    one, other = made(tmp_path / "a", model(), ranks=2), made(tmp_path / "b", changed, ranks=3)
    first, second = differences(one, other)
    assert (first.engine, first.tensor, first.state, first.place) == ("model0", "embedding", "fp32", (4, 1))
    assert first.values == pytest.approx((copy[4, 1] - 1e-6, copy[4, 1]), rel=1e-6)
    assert (first.num_elements, first.largest) == (2, pytest.approx(2.0))
    assert (second.state, second.num_elements) == ("exp_avg", 35)
    assert [each.state for each in differences(one, other, weights_only=True)] == ["fp32"]


def test_integers_beyond_a_float_are_told_apart_and_nan_is_itself(tmp_path: Path) -> None:
    left, right = model(), model()
    right["count"] = {"weight": ("I64", np.array(2**60))}
    for each in (left, right):
        each["bias"] = {"weight": ("F16", np.array([1.0, np.nan, np.inf]))}
    (found,) = differences(made(tmp_path / "a", left), made(tmp_path / "b", right))
    assert (found.tensor, found.place) == ("count", ())


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
    assert [(each.engine, each.tensor, each.state, each.message) for each in differences(one, other)] == [
        ("model0", "embedding", "weight", "the type is BF16 and F32"),
        ("model0", "embedding", "exp_avg_sq", "only in the second"),
        ("model0", "bias", "", "only in the first"),
        ("model0", "count", "", "the shape is [] and [2]"),
        ("model0", "new", "", "only in the second"),
        ("model1", "", "", "engine only in the second"),
    ]


def test_weights_in_fp32_are_compared_with_the_optimizers_copy(tmp_path: Path) -> None:
    """As where one was trained with ZeRO, and the other without."""
    values = np.random.default_rng(0).standard_normal(9)
    one = made(tmp_path / "a", {"w": {"weight": ("F32", values)}})
    other = made(tmp_path / "b", {"w": {"weight": ("F32", values), "fp32": ("F32", values + 1)}})
    assert [each.state for each in differences(one, other)] == ["fp32"]


def test_a_copy_alone_stands_for_its_weights(tmp_path: Path) -> None:
    """As under ZeRO 3, which keeps no other."""
    values = np.random.default_rng(0).standard_normal(9)
    one = made(tmp_path / "a", {"w": {"fp32": ("F32", values)}})
    other = made(tmp_path / "b", {"w": {"weight": ("BF16", values), "fp32": ("F32", values)}})
    plain = made(tmp_path / "c", {"w": {"weight": ("F32", values)}})
    for left, right in ((one, other), (other, one), (one, plain), (plain, one)):
        assert list(differences(left, right)) == []


def test_a_weight_that_is_tied_in_one_alone_is_compared_by_each_name(tmp_path: Path) -> None:
    values = np.arange(4.0)
    tied = made(tmp_path / "a", {"embedding": {"weight": ("F32", values)}}, aliases={"head": "embedding"})
    apart = {"embedding": {"weight": ("F32", values)}, "head": {"weight": ("F32", values + 1)}}
    for left, right in ((tied, made(tmp_path / "b", apart)), (made(tmp_path / "c", apart), tied)):
        (found,) = differences(left, right)
        assert found.num_elements == 4


def test_a_tolerance_is_absolute(tmp_path: Path) -> None:
    values = np.zeros(5)
    one = made(tmp_path / "a", {"w": {"weight": ("F32", values)}})
    other = made(tmp_path / "b", {"w": {"weight": ("F32", values + np.array([0, 0.25, 0, 0.5, np.nan]))}})
    (found,) = differences(one, other, tolerance=0.25)
    assert (found.place, found.num_elements, found.largest) == ((3,), 2, np.inf)


def test_a_file_that_is_too_short_or_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    one, other = made(tmp_path / "a", model()), made(tmp_path / "b", model())
    (other / "model0/rank0.bin").write_bytes(b"header")
    with pytest.raises(CheckpointError, match="ends before its slice"):
        list(differences(one, other))
    with pytest.raises(CheckpointError, match="no folder model0"):
        list(differences(one, tmp_path))
