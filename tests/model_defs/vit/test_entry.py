"""An image that cannot be read ends a training, with its name."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from tests.harness.command import det_ds


def test_an_image_that_is_found_broken_in_training_is_named(tmp_path: Path) -> None:
    """By a process that reads ahead, of two batches for training."""
    for number in range(136):
        path = tmp_path / "images" / ("train" if number < 128 else "val") / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, 0, 0)).save(path)
    broken = tmp_path / "images/train/a/100.png"
    broken.write_bytes(broken.read_bytes()[:40])
    sets = {
        "data.path": tmp_path / "images",
        "data.check_images": 0,
        "data.num_workers": 1,
        "hyperparameters.fit.max_length.batches": 3,
        "hyperparameters.warmup_num_steps": 1,
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    done = det_ds("run", "experiments/vit/const.yaml", ".", *words, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert str(broken) in done.stderr
    assert "Traceback" not in done.stderr
