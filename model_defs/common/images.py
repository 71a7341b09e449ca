"""Images on disk, and the handwritten digits that every machine with scikit-learn has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from model_defs.common.files import split, visible_files
from model_defs.common.sections import data_error

KEY = "data.path"
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


class Found(NamedTuple):
    """An image file, and its path from the folder of its side, which is its name."""

    name: str
    file: Path


def find_images(
    path: str, validation_fraction: float, *, by: Callable[[str], str] = str
) -> tuple[list[Found], list[Found]]:
    """The images of a folder at any depth, for training and for validation, in the order of their names.

    Where the folder has a ``train``, that and ``val`` are the sides. Else a hash of the names divides the images.

    Args:
        path: The folder, as the configuration names it.
        validation_fraction: About this part of them goes to validation, where the folder has no sides of its own.
        by: The part of an image's name that the hash is of: images that have it in common stay together.

    Raises:
        DataError: A side has no image.
    """
    root = Path(path).expanduser()
    roots = [root / "train", root / "val"] if (root / "train").is_dir() else [root]
    found = [
        [Found(name, file) for name, file in visible_files(each) if file.suffix.lower() in SUFFIXES]
        for each in roots
    ]
    if len(found) == 1:
        found = [*split(found[0], validation_fraction, by=lambda each: by(each.name))]
    if not all(found):
        there = f"{len(found[0])} images for training and {len(found[1])} for validation"
        fix = f"a folder with images ({', '.join(SUFFIXES)}), or with train/ and val/ of them"
        raise data_error(KEY, path, f"there are {there}, seen from {os.getcwd()}.", fix)
    return found[0], found[1]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """An image file.

    Raises:
        DataError: It cannot be read, here or in the block; the file is named.
    """
    try:
        with Image.open(path) as image:
            yield image
    except Exception as error:  # What PIL raises differs by the format, and by where the file breaks off.
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        message = f"this image cannot be read: {reason}."
        raise data_error(KEY, str(path), message, "copy it again, or remove it") from error


def handwritten_digits() -> tuple[list[Image.Image], list[int]]:
    """Scikit-learn's 1797 digits: images of 8 x 8 grey pixels, and the label of each."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits: Any = load_digits()
    bytes_NHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return [Image.fromarray(bytes_HW) for bytes_HW in bytes_NHW], digits.target.tolist()
