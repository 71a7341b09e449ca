"""Images on disk, and the handwritten digits that every machine with scikit-learn has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from determined_ds.errors import DataError, Problem

KEY = "data.path"


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
        raise DataError(unreadable(path, error)) from error


def unreadable(path: str | Path, error: Exception) -> Problem:
    """The problem of an image that PIL cannot read."""
    reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
    return Problem(
        key=KEY,
        value=str(path),
        message=f"this image cannot be read: {reason}.",
        fix="copy it again, or remove it (and its line in a list, where there is one)",
        code="unreadable-image",
    )


def handwritten_digits() -> tuple[np.ndarray, list[int]]:
    """Scikit-learn's 1797 digits: bytes_NHW of 8 x 8 pixels, and the label of each.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        message = "the default, handwritten digits, comes with scikit-learn, which is not installed."
        fix = "pip install scikit-learn; or data.path: a folder of images"
        raise DataError(Problem(key=KEY, value=None, message=message, fix=fix)) from error
    digits: Any = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target.tolist()
