"""Frames, views and masks on disk, in a layout that a file manager shows at a glance.

::

    <path>/train.txt                                     names of scenes, one a line
    <path>/validation.txt                                and those for validation
    <path>/scenes/<scene>/<moment>/<view>.png            an image (or .jpg, .jpeg)
    <path>/scenes/<scene>/<moment>/<view>_mask.png       its mask, of the same size: 0 not drivable, all else drivable

The moments of a scene are in the order of their names; every moment of every scene has the same views. A sample is
``num_moments`` moments in a row. Without the two text files, scenes go to validation by a hash of their names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from determined_ds.errors import DataError
from model_defs.common.files import split
from model_defs.common.images import KEY, opened
from model_defs.common.sections import data_error

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
MASK = "_mask"
LAYOUT = "scenes/<scene>/<moment>/<view>.png, and <view>_mask.png beside it"
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
        validation_fraction: About this part of the scenes, where no text files list them.
        num_moments: A scene with fewer moments gives no sample.

    Raises:
        DataError: A file is missing, a mask is of another size, a moment lacks a view, a list names an unknown scene,
            or a split has no sample.
    """
    root = Path(path).expanduser()
    scenes_dir, lists = root / "scenes", [root / "train.txt", root / "validation.txt"]
    if not scenes_dir.is_dir():
        raise _refusal(scenes_dir, "no such folder.", f"lay the data out as {LAYOUT}; or data.path: null")
    names = sorted(entry.name for entry in scenes_dir.iterdir() if entry.is_dir())
    train, validation = split(names, names, validation_fraction)
    if any(file.is_file() for file in lists):
        try:
            train, validation = (file.read_text(encoding="utf-8").split("\n") for file in lists)
        except (OSError, UnicodeDecodeError) as error:
            raise _refusal(
                root, f"cannot be read: {error}.", "two text files with one scene a line"
            ) from error
        train, validation = ([line.strip() for line in side if line.strip()] for side in (train, validation))
        if strange := sorted({*train, *validation} - set(names)):
            message = f"scene {strange[0]!r} is not in scenes/."
            raise _refusal(root, message, "add it, or take it out of the list")
        if both := sorted(set(train) & set(validation)):
            message = f"scenes for training and for validation at once: {', '.join(both[:3])}."
            raise _refusal(lists[1], message, "keep each in one of the two lists")
    views: list[str] = []
    sides: tuple[list[list[Moment]], list[list[Moment]]] = ([], [])
    for side, scenes in zip(sides, (train, validation), strict=True):
        for scene in scenes:
            folders = [folder for folder in sorted((scenes_dir / scene).iterdir()) if folder.is_dir()]
            side.append([_moment(folder) for folder in folders])
            for moment in side[-1]:
                there = [image.stem for image, _ in moment]
                views = views or there
                if not there or there != views:
                    message = f"its views are {there}; those of the other moments are {views}."
                    fix = "the same views in every moment of every scene"
                    raise _refusal(scenes_dir / scene, message, fix)
        if not any(len(moments) >= num_moments for moments in side):
            message = f"a split has no sample: none of its {len(scenes)} scenes has {num_moments} moments."
            fix = "more scenes, fewer data.num_moments, or another data.validation_fraction"
            raise _refusal(root, message, fix)
    return *sides, len(views)


def _moment(folder: Path) -> Moment:
    """The headers checked."""
    moment = [
        (file, folder / f"{file.stem}{MASK}.png")
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.stem.endswith(MASK)
    ]
    for image, mask in moment:
        with opened(image) as seen, opened(mask) as drivable:
            if seen.size != drivable.size:
                message = f"is of {drivable.size} pixels, and {image.name} of {seen.size}."
                raise _refusal(mask, message, "a mask of the size of its image")
    return moment


def _refusal(path: Path, message: str, fix: str) -> DataError:
    return data_error(KEY, str(path), message, fix)
