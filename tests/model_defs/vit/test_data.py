"""What a sample becomes is a function of the seed, the epoch and the sample: resumed, with workers, or neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from determined_ds import DataLoader
from determined_ds.errors import DataError
from model_defs.vit.augment import Augmentation, Pixels, jittered, random_box
from model_defs.vit.data import EpochSampler, ImageDataset, load_images, normalization
from tests.package import refusal, training_data

HALVES = {"image_size": 16, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.fixture(scope="module")
def digits() -> ImageDataset:
    return load_images({"validation_fraction": 0.97}).datasets(image_size=16, seed=5)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(20):
        path = tmp_path / "ab"[number % 2] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (9, 7), number * 10).save(path)
    return tmp_path


# --- the default ---


def test_by_default_handwritten_digits() -> None:
    data = load_images(None)
    assert data.classes == list("0123456789")
    assert len(data.train) + len(data.validation) == 1797
    assert 300 < len(data.validation) < 420
    assert "handwritten digits" in data.description
    assert not data.augmentation.horizontal_flip
    train, validation = data.datasets(image_size=16, seed=0)
    for dataset in (train, validation):
        pixels_CHW, label = dataset[0]
        assert pixels_CHW.shape == (3, 16, 16)
        assert pixels_CHW.dtype == torch.float32
        assert -1 <= pixels_CHW.min() < pixels_CHW.max() <= 1
        assert label == dataset.images[0][1]
    assert torch.equal(validation[3][0], validation[3 + 2 * len(validation)][0])


# --- augmentation ---


def test_a_sample_is_another_each_epoch_and_the_same_again(digits: ImageDataset) -> None:
    once, later = digits[2][0], digits[2 + len(digits)][0]
    torch.rand(3), np.random.rand(3)
    assert torch.equal(digits[2][0], once)
    assert torch.equal(digits[2 + len(digits)][0], later)
    assert not torch.equal(once, later)
    other = ImageDataset(digits.images, digits.pixels, seed=6)
    assert not torch.equal(other[2][0], once)


def test_crops_lie_within_the_image_and_keep_their_share() -> None:
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(300):
        left, upper, right, lower = random_box(40, 30, 0.3, generator)
        assert 0 <= left < right <= 40
        assert 0 <= upper < lower <= 30
        shares.append((right - left) * (lower - upper) / 1200)
    assert 0.29 < min(shares) < 0.4
    assert max(shares) > 0.9
    assert random_box(1000, 10, 0.9, generator) == (0, 0, 1000, 10)


def test_flips_and_colours() -> None:
    generator = np.random.default_rng(0)
    image = Image.fromarray(np.tile(np.arange(16, dtype=np.uint8)[None, :, None] * 16, (16, 1, 3)))
    flips = Pixels(
        **HALVES, augmentation=Augmentation(crop_scale=1.0, horizontal_flip=True, color_jitter=0.0)
    )
    rising = [bool(flips(image, generator)[0, 0, 0] < flips(image, generator)[0, 0, -1]) for _ in range(40)]
    assert 5 < sum(rising) < 35
    pixels_HWC = np.random.default_rng(1).random((8, 8, 3), dtype=np.float32)
    varied = jittered(pixels_HWC, 0.4, generator)
    assert varied.dtype == np.float32
    assert 0 <= varied.min() < varied.max() <= 1
    assert not np.allclose(varied, pixels_HWC)
    assert jittered(pixels_HWC, 0.0, generator) is pixels_HWC


def test_validation_keeps_the_whole_image() -> None:
    image = Image.new("RGB", (40, 20), (255, 0, 51))
    pixels_CHW = Pixels(**HALVES)(image, np.random.default_rng(0))
    assert torch.allclose(pixels_CHW[:, 5, 5], torch.tensor([1.0, -1.0, -0.6]))
    assert pixels_CHW.std((1, 2)).max() < 1e-6


def test_a_checkpoints_own_normalization(tmp_path: Path) -> None:
    assert normalization(None) == normalization(str(tmp_path)) == ((0.5,) * 3, (0.5,) * 3)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 2]}'
    )
    assert normalization(str(tmp_path)) == ((0.1, 0.2, 0.3), (1, 1, 2))


# --- the stream of a rank ---


def stream(dataset: ImageDataset, num_workers: int, *, start: int = 0) -> list[Any]:
    """A rank's batches of the first nine steps, more than an epoch, from one of them on."""
    loader = DataLoader(
        dataset, batch_size=4, sampler=EpochSampler(len(dataset)), drop_last=True, num_workers=num_workers
    )
    data = training_data(loader, (2, 1, 4), replica=1, seed=5, start=start)
    assert data.batches_per_epoch < 8
    return [next(data.batches) for _ in range(9 - start)]


@pytest.mark.parametrize(("num_workers", "start"), [(0, 1), (0, 7), (0, 8), (2, 0), (1, 6)])
def test_resumed_or_with_workers_it_is_the_same(num_workers: int, start: int, digits: ImageDataset) -> None:
    whole = stream(digits, 0)
    torch.rand(5)
    for found, expected in zip(stream(digits, num_workers, start=start), whole[start:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_epoch_has_every_sample_once() -> None:
    sampler = EpochSampler(10)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == list(range(10))
    assert sorted(second) == list(range(10, 20))
    assert [number % 10 for number in first] != [number % 10 for number in second]
    sampler.set_epoch(5)
    assert sorted(sampler) == list(range(50, 60))


# --- what cannot be ---


def test_an_image_that_cannot_be_read_is_named(folder: Path) -> None:
    broken = folder / "a" / "04.png"
    broken.write_bytes(broken.read_bytes()[:40])
    assert refusal(lambda: load_images({"path": str(folder)})).value == str(broken)
    # Looked at only when its turn comes, it is named all the same.
    sides = load_images({"path": str(folder), "check_images": 0}).datasets(image_size=16, seed=0)
    with pytest.raises(DataError, match=r"04\.png"):
        _ = [dataset[index] for dataset in sides for index in range(len(dataset))]
