"""Images for DCGAN: digits by default, else any folder, and a folder that cannot be used is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from determined_ds.errors import DataError
from model_defs.dcgan.data import load_images
from model_defs.dcgan.images import WithLatents


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


def test_an_image_stays_on_its_side_when_others_come(folder: Path) -> None:
    before = set(load(folder).validation.files)
    Image.new("L", (8, 8)).save(folder / "new.png")
    assert set(load(folder).validation.files) - {folder / "new.png"} == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no folder", ["no such folder, seen from"]),
        ("no image", ["there is no image in it"]),
        ("one image", ["has one image"]),
        ("corrupt", ["a/1.png", "this image cannot be read", "b/c/0.png"]),
    ],
)
def test_what_is_wrong_with_a_folder(name: str, said: list[str], folder: Path, tmp_path: Path) -> None:
    root = folder
    if name in ("no image", "one image"):
        root = tmp_path / "other"
        root.mkdir()
    if name == "no folder":
        root = tmp_path / "nowhere"
    if name == "one image":
        Image.new("L", (8, 8)).save(root / "one.png")
    if name == "corrupt":
        (folder / "a/1.png").write_bytes(b"no image")
        (folder / "b/c/0.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        load(root)
    assert all(problem.fix for problem in caught.value.problems)
    for words in said:
        assert words in str(caught.value)


def test_a_file_that_is_cut_short_is_named_when_it_is_read(folder: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8)
    for path in folder.rglob("[0-9]*.png"):
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:200])  # the header is whole
    data = load(folder)
    with pytest.raises(DataError, match=rf"{data.train.files[0].name}.*this image cannot be read"):
        data.train[0]
