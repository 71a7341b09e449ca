"""Samples: drawn scenes are decided by their index, and a folder is what its layout says or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from model_defs.drivable_vit.data import TRAIN, VALIDATION, DrawnScenes, load_data
from model_defs.drivable_vit.renderer import CAMERA_HEIGHT_M, Boxes, Scene, render
from tests.package import refusal

WHITE = np.ones(3)
CALM = {"bend": 0.0, "crossing": None, "lateral": 0.0, "heading": 0.0, "pitch": 0.0, "shadows": 0.0}
COLOURS = {
    "road_3": 0.4 * WHITE,
    "pavement_3": 0.6 * WHITE,
    "verge_3": 0.2 * WHITE,
    "sky_3": WHITE,
    "light": 1.0,
}


def drawn(split: int = TRAIN, seed: int = 0) -> DrawnScenes:
    return DrawnScenes(4, seed=seed, split=split, img_size=16, num_views=2, num_moments=2)


def test_a_scene_is_decided_by_seed_split_and_index() -> None:
    pixels, masks = drawn()[1]
    torch.rand(3), np.random.rand(3)
    assert all(torch.equal(a, b) for a, b in zip((pixels, masks), drawn()[1], strict=True))
    assert (pixels.shape, masks.shape) == ((2, 2, 3, 16, 16), (2, 2, 16, 16))
    assert -1 <= pixels.min() < pixels.max() <= 1
    assert set(masks.unique().tolist()) == {0, 1}
    for other in (drawn()[2], drawn(VALIDATION)[1], drawn(seed=1)[1]):
        assert not torch.equal(pixels, other[0])


def mask_of(*boxes: tuple[float, float]) -> np.ndarray:
    """Of a straight road, with boxes on it."""
    count = len(boxes)
    there = Boxes(
        center_K2=np.array(boxes, dtype=float).reshape(count, 2),
        half_K3=np.tile([1.0, 1.0, 2.0], (count, 1)),
        yaw_K=np.zeros(count),
        speed_K=np.zeros(count),
        colour_K3=np.zeros((count, 3)),
    )
    scene = Scene(half_width=3.01, speed=10.0, boxes=there, **CALM, **COLOURS)
    return render(scene, img_size=65, view=0, num_views=1, moments_ago=0)[1]


def test_the_mask_is_where_the_road_is_and_no_box_hides_it() -> None:
    """A ray straight ahead that falls d metres below the eye at a distance of 1 m meets the ground at h/d."""
    free, blocked = mask_of(), mask_of((8.0, 0.0))
    assert not free[:33].any(), "the sky, and the horizon"
    steps = ((np.arange(65) + 0.5) / 65 * 2 - 1) * np.tan(np.radians(34))
    for row in range(36, 65):
        assert (free[row] == (np.abs(steps * CAMERA_HEIGHT_M / steps[row]) < 3.01)).all(), row
    assert not (blocked & ~free).any()
    near_the_box = int(33 + 65 / 2 * (CAMERA_HEIGHT_M / 7.0) / np.tan(np.radians(34)))
    assert not blocked[34 : near_the_box - 1, 32].any()
    assert blocked[near_the_box + 1 :, 32].all()
    assert blocked[40, 50] == free[40, 50]


# ---------------------------------------------------------------------------------------------- a folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Scenes of some moments; an image tells its scene, moment and view by its colour."""
    for scene_index, (scene, num_moments) in enumerate({"a": 5, "b": 2, "c": 2}.items()):
        for moment in range(num_moments):
            place = tmp_path / "scenes" / scene / f"{moment:03}"
            place.mkdir(parents=True)
            for view_index, view in enumerate(("front", "left")):
                colour = (scene_index * 10, moment * 10, view_index * 10)
                Image.new("RGB", (12, 8), colour).save(place / f"{view}.png")
                mask = Image.new("L", (12, 8), 0)
                mask.paste(255, (0, 4, 12, 8))
                mask.save(place / f"{view}_mask.png")
    (tmp_path / "train.txt").write_text("a\nb\n")
    (tmp_path / "validation.txt").write_text("c\n\n")
    return tmp_path


def load(folder: Path, **more: Any) -> Any:
    return load_data({"path": str(folder), **more}, img_size=4, seed=0)


def test_a_folder(folder: Path) -> None:
    data = load(folder)
    assert (data.num_views, data.num_moments) == (2, 2)
    assert (len(data.train), len(data.validation)) == (3, 1)  # of five moments, the last is left over
    pixels, masks = data.train[1]
    assert pixels.shape == (2, 2, 3, 4, 4)
    colours = ((pixels[..., 0, 0] + 1) * 127.5).round().int()
    assert colours.tolist() == [[[0, 20, 0], [0, 20, 10]], [[0, 30, 0], [0, 30, 10]]]
    assert masks[0, 0].tolist() == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    assert len(load(folder, num_moments=1).train) == 7


SMALL_MASK = Image.new("L", (6, 4))
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing mask": (lambda root: (root / "scenes/a/001/left_mask.png").unlink(), "No such file"),
    "small mask": (lambda root: SMALL_MASK.save(root / "scenes/b/000/front_mask.png"), "is of (6, 4) pixels"),
    "no image": (lambda root: (root / "scenes/c/000/left.png").write_bytes(b"no image"), "cannot be read"),
    "a view less": (lambda root: (root / "scenes/b/001/left.png").unlink(), "its views are ['front']"),
    "empty list": (lambda root: (root / "validation.txt").write_text("\n"), "none of its 0 scenes"),
    "in both": (lambda root: (root / "validation.txt").write_text("a\nc\n"), "at once: a"),
    "too few moments": (lambda root: rmtree(root / "scenes/c/001"), "a split has no sample"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_folder_is_named(name: str, folder: Path) -> None:
    damage, said = WRONG[name]
    damage(folder)
    found = refusal(lambda: load(folder))
    assert said in found.message
    assert str(found.value).startswith(str(folder))
