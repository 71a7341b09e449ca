"""An image that cannot be read ends a training, with its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.harness.command import det_ds


@pytest.fixture
def one_is_broken(tmp_path: Path) -> Path:
    """Images of two classes, two batches for training, one of them cut short."""
    for number in range(136):
        path = tmp_path / "images" / ("train" if number < 128 else "val") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(path)
    broken = tmp_path / "images" / "train" / "a" / "100.png"
    broken.write_bytes(broken.read_bytes()[:40])
    return broken


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_is_found_broken_in_training_is_named(one_is_broken: Path, num_workers: int) -> None:
    images = one_is_broken.parents[2]
    data = {"path": images, "check_images": 0, "num_workers": num_workers}
    words = [word for key, value in data.items() for word in ("--set", f"data.{key}={value}")]
    length = (
        "--set",
        "hyperparameters.fit.max_length.batches=3",
        "--set",
        "hyperparameters.warmup_num_steps=1",
    )
    done = det_ds(
        "run", "experiments/vit/const.yaml", ".", *words, *length, "--run-dir", images.parent / "run"
    )
    assert done.returncode == 2
    assert str(one_is_broken) in done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr
