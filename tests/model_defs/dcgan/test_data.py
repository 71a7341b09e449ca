"""Images for DCGAN: digits by default, else any folder, and a folder that cannot be used is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from model_defs.dcgan.data import WithLatents, load_images
from tests.package import refusal


def test_digits_by_default() -> None:
    data = load_images(None, image_size=8)
    assert (len(data.train), len(data.validation), data.num_colours) == (1437, 360, 1)
    image = data.train[0]
    assert image.shape == (1, 8, 8)
    assert image.dtype == torch.float32
    assert (image.min(), image.max()) == (-1, 1)
    assert load_images({}, image_size=16).validation[3].shape == (1, 16, 16)


def test_latents_of_validation_are_decided_by_their_index() -> None:
    images = load_images(None, image_size=8).validation
    torch.manual_seed(0)
    first = WithLatents(images, 5, seed=1)
    torch.manual_seed(1)
    again = WithLatents(images, 5, seed=1)
    assert torch.equal(first[3][1], again[3][1])
    assert torch.equal(first[3][0], images[3])
    assert not torch.equal(first[3][1], first[4][1])
    assert not torch.equal(first[3][1], WithLatents(images, 5, seed=2)[3][1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(12):
        sub = tmp_path / ("a" if index % 2 else "b/c")
        sub.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (20, 10), (index, 0, 255))
        image.paste((9, 9, 9), (0, 0, 3, 10))  # falls away: the middle is cut out
        image.save(sub / f"{index}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_bytes(b"")
    return tmp_path


def load(folder: Path, **more: Any) -> Any:
    return load_images({"path": str(folder), "validation_fraction": 0.4, **more}, image_size=8)


def test_a_folder_at_any_depth(folder: Path) -> None:
    data = load(folder)
    assert len(data.train) + len(data.validation) == 12
    assert len(data.validation) > 0
    assert not set(data.train.images) & set(data.validation.images)
    image = data.train[0]
    assert image.shape == (3, 8, 8)
    assert (image[1] == -1).all()
    assert (image[2] == 1).all()
    assert load(folder, num_colours=1).train[0].shape == (1, 8, 8)


def test_what_is_wrong_with_a_folder(folder: Path, tmp_path: Path) -> None:
    """It has one image, and one that cannot be read."""
    Image.new("L", (8, 8)).save(tmp_path / "one.png")
    (tmp_path / "bare").mkdir()
    (tmp_path / "one.png").rename(tmp_path / "bare/one.png")
    assert "holds 1 images" in refusal(lambda: load(tmp_path / "bare")).message
    (folder / "a/1.png").write_bytes(b"no image")
    sides = load(folder)[:2]
    found = refusal(lambda: [side[index] for side in sides for index in range(len(side))])
    assert found.value == str(folder / "a/1.png")
