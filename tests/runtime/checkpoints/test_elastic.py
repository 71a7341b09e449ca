"""A checkpoint's engines are read by any number of ranks under any strategy, bit for bit.

On real engines: one, two and four ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import Ranks
from tests.runtime.checkpoints.strategies import ZERO, contents, run

STEPS = 3


@pytest.fixture(scope="module")
def ranks(one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks) -> dict[int, Ranks]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


def differing(path: Path, other: Path) -> list[tuple[str, str]]:
    """What both checkpoints hold, and with other values."""
    one, two = contents(path), contents(other)
    return [key for key in one if key in two and not torch.equal(one[key].float(), two[key].float())]


@pytest.mark.parametrize("name", ZERO)
def test_there_and_back(name: str, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """What ZeRO 1 on two ranks wrote, read and written by another strategy, is read back bit for bit."""
    half = {"bf16": True} if name.startswith("bf16") else {}
    home = {"zero": {"stage": 1}, **half}
    away = ZERO[name]
    sizes = [size for size in (1, 2, 4) if size >= max(away.get("pipe", 1), 2 if name == "hpz" else 1)]
    first, *_ = ranks[2].run(run, home, str(tmp_path), write=str(tmp_path / "a"), steps=STEPS)
    whole, *_ = ranks[2].run(run, home, str(tmp_path), read=str(tmp_path / "a"), first=STEPS, steps=2)
    assert len(first) == STEPS
    for size in sizes:
        there, back = tmp_path / f"b{size}", tmp_path / f"c{size}"
        ranks[size].run(run, away, str(tmp_path), read=str(tmp_path / "a"), write=str(there))
        ranks[2].run(run, home, str(tmp_path), read=str(there), write=str(back))
        assert differing(tmp_path / "a", there) == []
        assert contents(back).keys() == contents(tmp_path / "a").keys()
        assert differing(tmp_path / "a", back) == []
        losses, *_ = ranks[size].run(run, away, str(tmp_path), read=str(tmp_path / "a"), first=STEPS, steps=2)
        assert losses == pytest.approx(whole, abs=2e-2 if half else 1e-6)
