"""Files of a folder, and the split of what is in them into training and validation."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from model_defs.common.sections import data_error

T = TypeVar("T")


def visible_files(root: Path, *, skipped: Collection[str] = ()) -> Iterator[tuple[str, Path]]:
    """A file by its name; or each file below a folder that is not hidden, by its path from there, sorted.

    Args:
        root: File or folder.
        skipped: Names of folders that are not entered.
    """
    if root.is_file():
        yield root.name, root
    for folder, subfolders, names in os.walk(root):
        # os.walk enters what is left in this list, in this order.
        subfolders[:] = sorted(
            each for each in subfolders if each not in skipped and not each.startswith(".")
        )
        for name in sorted(each for each in names if not each.startswith(".")):
            yield Path(folder, name).relative_to(root).as_posix(), Path(folder, name)


def split(samples: Sequence[T], fraction: float, *, by: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Divide samples into training and validation by a hash of their names; each side keeps their order.

    A sample stays on its side when others are added. Of two or more names each side gets at least one; a single
    name goes to training.

    Args:
        samples: What is divided.
        fraction: About this part of the names is for validation, in (0, 1).
        by: The name of a sample; samples of the same name stay together.
    """
    places = []  # of each sample: a number in [0, 1), uniform over names
    for sample in samples:
        digest = hashlib.sha256(by(sample).encode("utf-8", errors="surrogateescape")).digest()
        places.append(int.from_bytes(digest[:6], "big") / 2**48)
    lowest, highest = min(places, default=0.0), max(places, default=0.0)
    # The threshold moves only where one of the sides would be empty.
    threshold = min(max(fraction, math.nextafter(lowest, 2.0)), highest)
    sides: tuple[list[T], list[T]] = ([], [])
    for sample, place in zip(samples, places, strict=True):
        sides[place < threshold].append(sample)
    return sides


def check_apart(path: str | None, validation_path: str | None) -> None:
    """Refuse a ``data.validation_path`` within ``data.path``, or the other way round."""
    if path is not None and validation_path is not None:
        train, validation = (Path(each).expanduser().resolve() for each in (path, validation_path))
        if train.is_relative_to(validation) or validation.is_relative_to(train):
            message = f"overlaps data.path = {path!r}: validation data would be trained on."
            fix = "separate the two paths; or data.validation_path: null, which splits data.path"
            raise data_error("data.validation_path", validation_path, message, fix)
