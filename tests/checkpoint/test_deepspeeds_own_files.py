"""Checkpoints without an index, as DeepSpeed alone and earlier versions write them: their weights are compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds.checkpoint.first_difference import differences, knows_optimizers
from determined_ds.errors import DeterminedDSError
from tests.checkpoint.making import made

VALUES = np.random.default_rng(0).standard_normal((3, 4)).astype("<f4")


def written(path: Path, module: Any) -> Path:
    (path / "model0").mkdir(parents=True)
    torch.save({"module": module}, path / "model0/mp_rank_00_model_states.pt")
    return path


def weights(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    weight = torch.nn.Parameter(torch.tensor(VALUES))
    return {"weight": weight, "half": torch.ones(3, dtype=torch.bfloat16), "count": torch.tensor(5)} | changed


def test_weights_are_compared_by_value(tmp_path: Path) -> None:
    changed = torch.tensor(VALUES)
    changed[2, 1] += 1
    one, same = written(tmp_path / "a", weights()), written(tmp_path / "b", weights())
    other = written(tmp_path / "c", weights(weight=changed, half=torch.ones(3), count=torch.tensor(6)))
    assert not knows_optimizers(one)
    assert list(differences(one, same)) == []
    found = {each.tensor: each for each in differences(one, other)}
    assert (found["weight"].place, found["weight"].largest) == ((2, 1), pytest.approx(1))
    assert found["half"].message == "the type is BF16 and F32"
    assert found["count"].values == (5, 6)


def test_they_are_compared_with_those_of_an_index(tmp_path: Path) -> None:
    legacy = written(tmp_path / "a", {"weight": torch.tensor(VALUES)})
    states = {"weight": ("F32", VALUES), "fp32": ("F32", VALUES), "exp_avg": ("F32", VALUES)}
    indexed = made(tmp_path / "b", {"weight": states}, ranks=2)
    for one, other in ((legacy, indexed), (indexed, legacy)):
        assert list(differences(one, other, weights_only=True)) == []


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_nothing_of_them_is_executed(tmp_path: Path) -> None:
    attack, plain = written(tmp_path / "a", {"weight": Attack()}), written(tmp_path / "b", weights())
    with pytest.raises(DeterminedDSError, match="system"):
        list(differences(attack, plain))
    (plain / "model0/mp_rank_00_model_states.pt").write_bytes(b"torn")
    with pytest.raises(DeterminedDSError):
        list(differences(plain, plain))
