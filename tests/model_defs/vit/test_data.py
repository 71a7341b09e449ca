"""What a sample becomes is a function of the seed, the epoch and the sample: resumed, with workers, or neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from determined_ds import DataLoader
from model_defs.vit.data import EpochSampler, ImageDataset, Pixels, load_images
from tests.harness.command import det_ds
from tests.package import training_data

HALVES = {"image_size": 16, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.fixture(scope="module")
def digits() -> ImageDataset:
    return load_images({"validation_fraction": 0.97}).datasets(image_size=16, seed=5)[0]


# --- the default ---


def test_by_default_handwritten_digits() -> None:
    data = load_images(None)
    assert data.classes == list("0123456789")
    assert len(data.train) + len(data.validation) == 1797
    for dataset in data.datasets(image_size=16, seed=0):
        pixels_CHW, label = dataset[0]
        assert (pixels_CHW.shape, pixels_CHW.dtype) == ((3, 16, 16), torch.float32)
        assert -1 <= pixels_CHW.min() < pixels_CHW.max() <= 1
        assert label == dataset.images[0][1]
    assert torch.equal(dataset[3][0], dataset[3 + 2 * len(dataset)][0]), "validation is not varied"


# --- augmentation ---


def test_a_sample_is_another_each_epoch_and_the_same_again(digits: ImageDataset) -> None:
    once, later = digits[2][0], digits[2 + len(digits)][0]
    torch.rand(3), np.random.rand(3)
    assert torch.equal(digits[2][0], once)
    assert torch.equal(digits[2 + len(digits)][0], later)
    assert not torch.equal(once, later)
    other = ImageDataset(digits.images, digits.pixels, seed=6)
    assert not torch.equal(other[2][0], once)


def test_validation_keeps_the_whole_image() -> None:
    image = Image.new("RGB", (40, 20), (255, 0, 51))
    pixels_CHW = Pixels(**HALVES)(image, np.random.default_rng(0))
    assert torch.allclose(pixels_CHW[:, 5, 5], torch.tensor([1.0, -1.0, -0.6]))
    assert pixels_CHW.std((1, 2)).max() < 1e-6


# --- the stream of a rank ---


def stream(dataset: ImageDataset, num_workers: int, *, start: int = 0) -> list[Any]:
    """A rank's batches of the first nine steps, more than an epoch, from one of them on."""
    loader = DataLoader(
        dataset, batch_size=4, sampler=EpochSampler(len(dataset)), drop_last=True, num_workers=num_workers
    )
    data = training_data(loader, (2, 1, 4), replica=1, seed=5, start=start)
    assert data.batches_per_epoch < 8
    return [next(data.batches) for _ in range(9 - start)]


@pytest.mark.parametrize(("num_workers", "start"), [(0, 1), (0, 7), (1, 6)])
def test_resumed_or_with_workers_it_is_the_same(num_workers: int, start: int, digits: ImageDataset) -> None:
    whole = stream(digits, 0)
    torch.rand(5)
    for found, expected in zip(stream(digits, num_workers, start=start), whole[start:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- what cannot be ---


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
        "data.num_workers": 1,
        "hyperparameters.fit.max_length.batches": 3,
        "hyperparameters.warmup_num_steps": 1,
    }
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    done = det_ds("run", "experiments/vit/const.yaml", ".", *words, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert str(broken) in done.stderr
    assert "Traceback" not in done.stderr
