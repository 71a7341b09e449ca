"""Frames, views and masks on disk, in a layout that a file manager shows at a glance.

::

    <path>/<scene>/<moment>/<view>.png            an image (or .jpg, .jpeg)
    <path>/<scene>/<moment>/<view>_mask.png       its mask, of the same size: 0 not drivable, all else drivable

The moments of a scene are in the order of their names; every moment of every scene has the same views. A sample is
``num_moments`` moments in a row. With folders ``train`` and ``val``, each with scenes, those are the splits; else
scenes go to validation by a hash of their names.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from model_defs.common.images import KEY, find_images, opened
from model_defs.common.sections import data_error

LAYOUT = "<scene>/<moment>/<view>.png, and <view>_mask.png beside it"
Moment = list[tuple[Path, Path]]  # of each view, in the order of their names: the image and its mask


class FrameWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of moments in a row, without overlap; what is left over at the end of a scene is dropped.

    Item ``i`` is ``(pixels_MVCHW, masks_MVHW)``: float32 in [-1, 1], and uint8, 1 where one can drive.

    Args:
        scenes: Of each, its moments in order.
        num_moments: Moments of a window.
        img_size: Height and width that everything is resized to.
    """

    def __init__(self, scenes: list[list[Moment]], num_moments: int, img_size: int) -> None:
        self.img_size = img_size
        self.windows = [
            moments[start : start + num_moments]
            for moments in scenes
            for start in range(0, len(moments) - num_moments + 1, num_moments)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        size = (self.img_size, self.img_size)

        def pixels(path: Path) -> np.ndarray:
            with opened(path) as image:
                return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR))

        def mask(path: Path) -> np.ndarray:
            with opened(path) as image:
                # One channel whose zeros are the image's: indices of a palette stay as they are.
                grey = image if image.mode in ("1", "L", "P", "I", "I;16") else image.convert("L")
                # By the nearest pixel: between drivable and not there is nothing.
                return np.asarray(grey.resize(size, Image.Resampling.NEAREST)) > 0

        window = self.windows[index]
        images = np.array([[pixels(image) for image, _ in moment] for moment in window])
        return to_tensors(images, np.array([[mask(path) for _, path in moment] for moment in window]))


def to_tensors(pixels_MVHWC: np.ndarray, masks_MVHW: np.ndarray) -> tuple[Tensor, Tensor]:
    """Bytes and truth values as the model takes them: pixels_MVCHW in [-1, 1], masks_MVHW of 0 and 1."""
    pixels = torch.from_numpy(pixels_MVHWC).movedim(-1, -3).float() / 127.5 - 1
    return pixels, torch.from_numpy(masks_MVHW.astype(np.uint8))


def read_frames(
    path: str, validation_fraction: float, num_moments: int
) -> tuple[list[list[Moment]], list[list[Moment]], int]:
    """Find the files of a folder and check their headers: scenes for training and for validation, number of views.

    Args:
        path: The folder, in the layout above.
        validation_fraction: About this part of the scenes, where the folder has no ``train`` and ``val``.
        num_moments: A scene with fewer moments gives no sample.

    Raises:
        DataError: A file is missing, a mask is of another size, a moment lacks a view, or a split has no sample.
    """
    views: list[str] = []
    sides: tuple[list[list[Moment]], list[list[Moment]]] = ([], [])
    found = find_images(path, validation_fraction, by=lambda name: name.split("/")[0])
    for side, images in zip(sides, found, strict=True):
        frames = [each for each in images if not each.file.stem.endswith("_mask")]
        for name, file in frames:
            if name.count("/") != 2:
                raise data_error(KEY, str(file), "is not in a scene and a moment.", LAYOUT)
        for _, of_scene in groupby(frames, key=lambda each: each.name.split("/")[0]):
            side.append([])
            for _, of_moment in groupby(of_scene, key=lambda each: each.name.split("/")[1]):
                files = [each.file for each in of_moment]
                there = [file.stem for file in files]
                views = views or there
                if there != views:
                    message = f"its views are {there}; those of the other moments are {views}."
                    fix = "the same views in every moment of every scene"
                    raise data_error(KEY, str(files[0].parent), message, fix)
                side[-1].append([(file, _checked_mask(file)) for file in files])
        if not any(len(moments) >= num_moments for moments in side):
            message = f"a split has no sample: none of its {len(side)} scenes has {num_moments} moments."
            fix = "more scenes, fewer data.num_moments, or another data.validation_fraction"
            raise data_error(KEY, path, message, fix)
    return *sides, len(views)


def _checked_mask(image: Path) -> Path:
    """The mask of an image, of its size."""
    mask = image.with_name(f"{image.stem}_mask.png")
    with opened(image) as seen, opened(mask) as drivable:
        if seen.size != drivable.size:
            message = f"is of {drivable.size} pixels, and {image.name} of {seen.size}."
            raise data_error(KEY, str(mask), message, "a mask of the size of its image")
    return mask
