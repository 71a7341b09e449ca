"""Images on disk, and the handwritten digits that every machine with scikit-learn has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from model_defs.common.sections import data_error

KEY = "data.path"
SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Image.Image]:
    """An image file.

    Raises:
        DataError: It cannot be read, here or in the block; the file is named.
    """
    try:
        with Image.open(path) as image:
            yield image
    except Exception as error:  # What PIL raises differs by the format, and by where the file breaks off.
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        fix = "copy it again, or remove it (and its line in a list, where there is one)"
        raise data_error(KEY, str(path), f"this image cannot be read: {reason}.", fix) from error


def handwritten_digits() -> tuple[list[Image.Image], list[int]]:
    """Scikit-learn's 1797 digits: images of 8 x 8 grey pixels, and the label of each.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        message = "the default, handwritten digits, comes with scikit-learn, which is not installed."
        raise data_error(KEY, None, message, "pip install scikit-learn; or data.path: a folder") from error
    digits: Any = load_digits()
    bytes_NHW = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    return [Image.fromarray(bytes_HW) for bytes_HW in bytes_NHW], digits.target.tolist()
