"""Every file of a checkpoint is compared with its manifest, and every damaged one is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from determined_ds.checkpoint.verifying import DAMAGED, INTACT, UNVERIFIED, all_at, verify
from determined_ds.protocol.checkpoint_files import INDEX, checkpoint_at
from tests.checkpoint.making import made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weights = {"weight": {"weight": ("F32", np.arange(2.0e6))}}
    return made(tmp_path / "run/checkpoints/a", weights, ranks=3)


def test_an_intact_one_is_read_to_its_last_byte(path: Path) -> None:
    counts: list[int] = []
    found = verify(checkpoint_at(path), read=counts.append)
    assert (found.state, found.damages) == (INTACT, ())
    files = list((path / "model0").iterdir())
    assert found.num_files == len(files) == 4
    assert sum(counts) == sum(each.stat().st_size for each in files)
    assert len(counts) > 4, "large files report their progress"


def test_all_that_is_damaged_is_named(path: Path) -> None:
    (path / "model0/rank0.bin").unlink()
    torn = path / "model0/rank2.bin"
    torn.write_bytes(torn.read_bytes()[:-1])
    found = verify(checkpoint_at(path))
    assert found.state == DAMAGED
    assert [damage.split()[0] for damage in found.damages] == ["model0/rank0.bin", "model0/rank2.bin"]


def test_what_cannot_be_verified_is_not_called_intact(path: Path) -> None:
    (path / "manifest.json").unlink()
    assert verify(checkpoint_at(path)).state == UNVERIFIED
    (path / INDEX).write_text("{}")
    found = verify(checkpoint_at(path))
    assert found.state == UNVERIFIED
    assert "checkpoint_storage" in found.damages[0]


def test_a_run_directory_has_all_of_its_own(path: Path) -> None:
    made(path.with_name("b"), {}, steps=9)
    assert [each.uuid for each in all_at(path.parent.parent)] == ["b", "a"]
    assert all_at(path) == []
