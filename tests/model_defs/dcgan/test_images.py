"""Images for DCGAN: digits by default, else any folder, and a folder that cannot be used is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from model_defs.dcgan.data import load_images
from model_defs.dcgan.images import WithLatents
from tests.package import refusal, refusals


def test_digits_by_default() -> None:
    data = load_images(None, image_size=8)
    assert (len(data.train), len(data.validation), data.num_colours) == (1437, 360, 1)  # type: ignore[arg-type]
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
    assert not set(data.train.files) & set(data.validation.files)
    image = data.train[0]
    assert image.shape == (3, 8, 8)
    assert (image[1] == -1).all()
    assert (image[2] == 1).all()
    assert load(folder, num_colours=1).train[0].shape == (1, 8, 8)


def test_what_is_wrong_with_a_folder(folder: Path, tmp_path: Path) -> None:
    """It is not there, has no image, has one, and has some that cannot be read."""
    assert refusal(lambda: load(tmp_path / "nowhere")).key == "data.path"
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "no image" in refusal(lambda: load(bare)).message
    Image.new("L", (8, 8)).save(bare / "one.png")
    assert "one image" in refusal(lambda: load(bare)).message
    for name, content in (("a/1.png", b"no image"), ("b/c/0.png", b"")):
        (folder / name).write_bytes(content)
    found = refusals(lambda: load(folder))
    assert sorted(str(Path(str(problem.value)).relative_to(folder)) for problem in found) == [
        "a/1.png",
        "b/c/0.png",
    ]
