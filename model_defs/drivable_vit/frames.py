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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from determined_ds.errors import DataError, Problem
from model_defs.common.images import KEY, opened, unreadable
from model_defs.common.split import split

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
SPLITS = ("train", "validation")
MASK = "_mask"
# Of more problems than this, those beyond are cut: one wrong habit of naming makes every file a problem.
MAX_PROBLEMS = 10
LAYOUT = "scenes/<scene>/<moment>/<view>.png, and <view>_mask.png beside it"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What the rig saw at one moment: of each view, in the order of their names, the image and its mask."""

    images: tuple[Path, ...]
    masks: tuple[Path, ...]


class FrameWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of moments in a row, without overlap; what is left over at the end of a scene is dropped.

    Item ``i`` is ``(pixels_MVCHW, masks_MVHW)``: float32 in [-1, 1], and uint8, 1 where one can drive.

    Args:
        scenes: Of each, its moments in order.
        num_moments: Moments of a window.
        img_size: Height and width that everything is resized to.
    """

    def __init__(self, scenes: Sequence[Sequence[Moment]], num_moments: int, img_size: int) -> None:
        self.img_size = img_size
        self.windows = [
            tuple(moments[start : start + num_moments])
            for moments in scenes
            for start in range(0, len(moments) - num_moments + 1, num_moments)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index]
        pixels = [[self._image(path) for path in moment.images] for moment in window]
        masks = [[self._mask(path) for path in moment.masks] for moment in window]
        return to_tensors(np.array(pixels), np.array(masks))

    def _image(self, path: Path) -> np.ndarray:
        with opened(path) as image:
            size = (self.img_size, self.img_size)
            return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BILINEAR))

    def _mask(self, path: Path) -> np.ndarray:
        with opened(path) as image:
            # By the nearest pixel: between drivable and not there is nothing.
            size = (self.img_size, self.img_size)
            return np.asarray(_grey(image).resize(size, Image.Resampling.NEAREST)) > 0


def _grey(image: Image.Image) -> Image.Image:
    """One channel whose zeros are the image's: indices of a palette stay as they are."""
    return image if image.mode in ("1", "L", "P", "I", "I;16") else image.convert("L")


def to_tensors(pixels_MVHWC: np.ndarray, masks_MVHW: np.ndarray) -> tuple[Tensor, Tensor]:
    """Bytes and truth values as the model takes them: pixels_MVCHW in [-1, 1], masks_MVHW of 0 and 1."""
    pixels = torch.from_numpy(pixels_MVHWC).movedim(-1, -3).float() / 127.5 - 1
    return pixels, torch.from_numpy(masks_MVHW.astype(np.uint8))


@dataclass(frozen=True, kw_only=True)
class Frames:
    """The scenes of a folder, checked.

    Args:
        train: Scenes for training, each with its moments.
        validation: Scenes for validation.
        views: Names of the views.
    """

    train: list[list[Moment]]
    validation: list[list[Moment]]
    views: tuple[str, ...]


def read_frames(path: str, validation_fraction: float, num_moments: int) -> Frames:
    """Find the files of a folder and check their headers.

    Args:
        path: The folder, in the layout above.
        validation_fraction: About this part of the scenes, where no text files list them.
        num_moments: A scene with fewer moments gives no sample.

    Raises:
        DataError: All that is wrong (the first ten): a missing file, one that is not an image, a mask of another size,
            a view that a moment lacks, an unknown scene, a split without a sample.
    """
    root = Path(path).expanduser()
    scenes_dir = root / "scenes"
    if not scenes_dir.is_dir():
        fix = f"lay the data out as {LAYOUT}; or data.path: null"
        raise DataError(_problem(scenes_dir, "no such folder.", fix))
    names = sorted(entry.name for entry in scenes_dir.iterdir() if entry.is_dir())
    problems: list[Problem] = []
    if any((root / f"{name}.txt").is_file() for name in SPLITS):
        chosen = {name: _listed(root / f"{name}.txt", names, problems) for name in SPLITS}
        _check_apart(root, chosen, problems)
    else:
        chosen = dict(zip(SPLITS, split(names, names, validation_fraction), strict=True))
    found: dict[str, list[list[Moment]]] = {}
    views: tuple[str, ...] = ()
    for name, of_split in chosen.items():
        found[name] = []
        for scene in of_split:
            moments, views = _scene(scenes_dir / scene, views, problems)
            found[name].append(moments)
        if not problems and not any(len(moments) >= num_moments for moments in found[name]):
            message = f"{name} has no sample: none of its {len(of_split)} scenes has {num_moments} moments."
            fix = (
                "more scenes, or fewer data.num_moments; without text files, another data.validation_fraction"
            )
            problems.append(_problem(root, message, fix))
        if len(problems) >= MAX_PROBLEMS:
            break
    if problems:
        raise DataError(problems[:MAX_PROBLEMS])
    return Frames(train=found["train"], validation=found["validation"], views=views)


def _listed(file: Path, names: list[str], problems: list[Problem]) -> list[str]:
    """The scenes that a text file names."""
    try:
        chosen = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        problems.append(_problem(file, f"cannot be read: {error}.", "a text file with one scene a line"))
        return []
    if not chosen:
        problems.append(_problem(file, "names no scene.", "one scene a line"))
    for name in chosen:
        if name not in names:
            message = f"scene {name!r} is not in scenes/."
            problems.append(_problem(file, message, "add it, or take it out of the list"))
    return [name for name in chosen if name in names]


def _check_apart(root: Path, chosen: dict[str, list[str]], problems: list[Problem]) -> None:
    both = sorted(set(chosen["train"]) & set(chosen["validation"]))
    if both:
        shown = ", ".join(both[:3]) + (f" and {len(both) - 3} more" if len(both) > 3 else "")
        message = f"scenes for training and for validation at once: {shown}."
        problems.append(_problem(root / "validation.txt", message, "keep each in one of the two lists"))


def _scene(
    folder: Path, views: tuple[str, ...], problems: list[Problem]
) -> tuple[list[Moment], tuple[str, ...]]:
    """The moments of a scene, and the views that all have, which the first moment of all decides."""
    moments = []
    for moment in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        images = {
            file.stem: file
            for file in sorted(moment.iterdir())
            if file.suffix.lower() in IMAGE_SUFFIXES and not file.stem.endswith(MASK)
        }
        views = views or tuple(images)
        if tuple(images) != views:
            has, needs = ", ".join(images) or "none", ", ".join(views) or "at least one"
            message = f"its views are {has}; those of the other moments are {needs}."
            problems.append(_problem(moment, message, "the same views in every moment of every scene"))
            continue
        masks = tuple(moment / f"{view}{MASK}.png" for view in views)
        for image, mask in zip(images.values(), masks, strict=True):
            problems.extend(_file_problems(image, mask))
        moments.append(Moment(images=tuple(images.values()), masks=masks))
        if len(problems) >= MAX_PROBLEMS:
            break
    return moments, views


def _file_problems(image: Path, mask: Path) -> list[Problem]:
    """What is wrong with the headers of an image and its mask."""
    problems: list[Problem] = []
    sizes = []
    for path in (image, mask):
        try:
            with Image.open(path) as opened:
                sizes.append(opened.size)
        except FileNotFoundError:
            problems.append(_problem(path, "is missing.", f"a mask beside each image: {mask.name}"))
        except (OSError, SyntaxError, ValueError) as error:
            problems.append(unreadable(path, error))
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        (width, height), (mask_width, mask_height) = sizes
        message = f"is {mask_width} x {mask_height}, and {image.name} is {width} x {height}."
        problems.append(_problem(mask, message, "a mask of the size of its image"))
    return problems


def _problem(path: Path, message: str, fix: str) -> Problem:
    return Problem(key=KEY, value=str(path), message=message, fix=fix)
