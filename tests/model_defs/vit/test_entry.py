"""ViT through the real entry: what is saved loads in plain Hugging Face, and what cannot be read is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

from determined_ds import load_model_from_checkpoint_path
from tests.command import ROOT, det_ds

CONST = "experiments/vit/const.yaml"


def options(**values: object) -> list[str]:
    """Hyperparameters for three batches, and more settings by their dotted names."""
    short = {"hyperparameters.fit.max_length.batches": 3, "hyperparameters.warmup_num_steps": 1}
    return [word for key, value in {**short, **values}.items() for word in ("--set", f"{key}={value}")]


def test_a_model_that_is_saved_loads_in_plain_hugging_face(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    zero3 = {"hyperparameters.deepspeed_config": "experiments/deepspeed/zero3.json"}
    done = det_ds("run", CONST, ".", *options(**zero3), "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    model = load_model_from_checkpoint_path(checkpoint, context_dir=ROOT)
    assert isinstance(model, transformers.ViTForImageClassification)
    model.save_pretrained(tmp_path / "saved")
    plain = transformers.ViTForImageClassification.from_pretrained(tmp_path / "saved").eval()
    pixels_BCHW = torch.rand(3, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(plain(pixels_BCHW).logits, model(pixels_BCHW).logits)
    assert plain.config.id2label[7] == "7"


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
    data = {"data.path": images, "data.check_images": 0, "data.num_workers": num_workers}
    run_dir = images.parent / "run"
    done = det_ds("run", CONST, ".", *options(**data), "--run-dir", run_dir)
    assert done.returncode == 2
    assert str(one_is_broken) in done.stderr
    assert "cannot be read" in done.stderr
    assert "fix: copy it again" in done.stderr
    assert "Traceback" not in done.stderr
