"""``det-ds bench`` measures collectives by size and matrix products, prints them, and refuses mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.command import det_ds


def bench(folder: Path, *words: str) -> Any:
    there = {"DETERMINED_DS_MACHINE": str(folder / "machine.json")}  # not the user's own
    return det_ds("bench", *words, "--run-dir", folder / "run", env=there)


def test_communication(tmp_path: Path) -> None:
    options = ["--seconds", "1", "--largest", "4KiB", "--collectives", "all_reduce,send_recv"]
    done = bench(tmp_path, "communication", *options)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "all_reduce: 2 ranks on 1 machine, gloo, float32" in done.stdout
    assert "send_recv: 2 ranks on 1 machine, gloo, float32" in done.stdout


def test_matrix_products(tmp_path: Path) -> None:
    done = bench(tmp_path, "training", "--models", "1x64", "--micro-batches", "2", "--seconds", "2")
    assert done.returncode == 0, done.stderr
    assert "peak in fp32:" in done.stdout
    assert not list(tmp_path.glob("run/**/checkpoints/*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "1"], "a single rank has no peer to communicate with"),
        (["--slots", "100000"], "--slots = 100000: this machine has"),
        (["--collectives", "gather"], "--collectives = 'gather': unknown name"),
        (["--largest", "many"], "--largest = 'many'"),
    ],
)
def test_mistakes_are_named_before_anything_starts(words: list[str], message: str, tmp_path: Path) -> None:
    done = bench(tmp_path, "communication", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
