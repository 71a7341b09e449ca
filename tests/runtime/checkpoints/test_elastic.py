"""A checkpoint's engines are read by any number of ranks under any strategy, bit for bit.

On real engines: one, two and four ranks.
"""

from __future__ import annotations

import subprocess
import sys
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


OLD = [
    "ddp",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "offload2",
    "bf16_zero0",
    "bf16_zero1",
    "bf16_zero3",
    "pipe2_zero1",
]


@pytest.mark.parametrize("name", OLD)
def test_what_deepspeed_wrote_itself_is_read_by_others(
    name: str, ranks: dict[int, Ranks], tmp_path: Path
) -> None:
    """Two ranks write DeepSpeed's own files, as earlier versions did; one rank and two read them, and train on."""
    own, half = ZERO[name], {"bf16": True} if name.startswith("bf16") else {}
    kept, slices = tmp_path / "deepspeed", tmp_path / "slices"
    ranks[2].run(run, own, str(tmp_path), write=str(kept), steps=STEPS, by_deepspeed=True)
    ranks[2].run(run, own, str(tmp_path), write=str(slices), steps=STEPS)
    whole, *_ = ranks[2].run(run, own, str(tmp_path), read=str(slices), first=STEPS, steps=2)
    for size, stage in ((1, 0), (2, 3), (1, 2)):
        other = {"zero": {"stage": stage}, **half}
        if "pipe" in own:  # DeepSpeed's names are those of a pipeline
            other = {"zero": {"stage": min(stage, 1)}, "pipe": 1}
        there = tmp_path / f"{size}_{stage}"
        ranks[size].run(run, other, str(tmp_path), read=str(kept), write=str(there))
        found, expected = contents(there), contents(slices)
        assert [key for key in found if key[1] != "weight" and key not in expected and key[1] != "fp32"] == []
        assert differing(slices, there) == []
        losses, *_ = ranks[size].run(run, other, str(tmp_path), read=str(kept), first=STEPS, steps=2)
        assert losses == pytest.approx(whole, abs=2e-2 if half else 1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_universal_checkpoint_is_read(stage: int, ranks: dict[int, Ranks], tmp_path: Path) -> None:
    """As DeepSpeed's own converter makes it."""
    own = {"zero": {"stage": stage}}
    kept, slices, universal = tmp_path / "deepspeed", tmp_path / "slices", tmp_path / "universal"
    ranks[2].run(run, own, str(tmp_path), write=str(kept), steps=STEPS, by_deepspeed=True)
    ranks[2].run(run, own, str(tmp_path), write=str(slices), steps=STEPS)
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command = [
        *converter,
        "--input_folder",
        str(kept / "model0"),
        "--output_folder",
        str(universal / "model0"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    for size, other in ((1, 0), (2, 1), (2, 3)):
        there = tmp_path / f"{size}_{other}"
        ranks[size].run(run, {"zero": {"stage": other}}, str(tmp_path), read=str(universal), write=str(there))
        assert differing(slices, there) == []
