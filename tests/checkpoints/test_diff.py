"""``checkpoint diff`` compares every tensor, however a checkpoint is cut into files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.command import checkpoint
from tests.checkpoints.making import made

VALUES = np.random.default_rng(0).standard_normal((7, 5))


def differences(one: Path, other: Path, *options: str) -> list[dict[str, Any]]:
    done = checkpoint("diff", one, other, "--json", *options)
    found = json.loads(done.stdout)
    assert done.exit_code == (0 if found["equal"] else 1)
    assert found["equal"] == (not found["differences"])
    return list(found["differences"])


def between(folder: Path, left: dict[str, Any], right: dict[str, Any], *options: str) -> list[dict[str, Any]]:
    """Where checkpoints of these tensors differ, which two ranks and three have written."""
    return differences(made(folder / "a", left, ranks=2), made(folder / "b", right, ranks=3), *options)


def model() -> dict[str, Any]:
    return {
        "embedding": {"weight": ("BF16", VALUES), "fp32": ("F32", VALUES), "exp_avg": ("F32", VALUES)},
        "bias": {"weight": ("F16", np.array([1.0, np.nan, np.inf]))},
        "count": {"weight": ("I64", np.array(2**60 + 1))},
        "empty": {"weight": ("F32", np.zeros((0, 4)))},
    }


def single(values: Any, kind: str = "F32") -> dict[str, Any]:
    return {"weight": (kind, np.asarray(values))}


def test_the_element_is_named_with_both_values(tmp_path: Path) -> None:
    """Only the optimizer's copy differs: in bf16 the weight is the same. NaN is itself, in any cut."""
    changed, copy = model(), VALUES.copy()
    copy[4, 1] += 1e-6
    copy[6, 4] += 2.0
    changed["embedding"] |= {"fp32": ("F32", copy), "exp_avg": ("F32", copy + 1)}
    first, second = between(tmp_path, model(), changed)
    assert (first["engine"], first["tensor"], first["state"]) == ("model0", "embedding", "fp32")
    assert first["place"] == [4, 1]
    assert first["values"] == pytest.approx((copy[4, 1] - 1e-6, copy[4, 1]), rel=1e-6)
    assert (first["num_elements"], first["largest"]) == (2, pytest.approx(2.0))
    assert (second["state"], second["num_elements"]) == ("exp_avg", 35)
    two = tmp_path / "a", tmp_path / "b"
    assert [each["state"] for each in differences(*two, "--weights")] == ["fp32"]
    (found,) = differences(*two, "--weights", "--tolerance", "0.25")  # an absolute one
    assert (found["place"], found["num_elements"]) == ([6, 4], 1)


def test_what_one_lacks_and_what_has_another_form_is_said(tmp_path: Path) -> None:
    left, right = model(), model()
    del right["bias"], right["embedding"]["fp32"]
    right |= {"new": single(np.zeros(2)), "count": single(2**60, "I64")}  # beyond a float
    right["embedding"] |= single(VALUES)
    right["embedding"]["exp_avg_sq"] = left["embedding"]["exp_avg"]
    found = [(each["tensor"], each["state"]) for each in between(tmp_path, left, right)]
    of_embedding = [("embedding", "weight"), ("embedding", "exp_avg_sq")]
    assert found == [*of_embedding, ("bias", ""), ("count", "weight"), ("new", "")]
