"""Folders of images -> which files, of which class, for training or for validation.

Two layouts: Food-101's own (``images/<class>/<id>.jpg``, and ``meta/`` with ``classes.txt``, ``train.txt`` and
``test.txt``), and a folder a class, either under ``train`` and one of ``val``, ``valid``, ``validation``, ``test``, or
right away.
No image is opened here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from model_defs.common.files import split
from model_defs.common.images import KEY, SUFFIXES
from model_defs.common.sections import data_error

LAYOUTS = "food-101/images and meta, as published; or train/<class>/ and val/<class>/; or <class>/"
Labelled = tuple[str, int]  # the path of an image, and its label


class ImageSplits(NamedTuple):
    """The images of a folder, none of them on both sides, and the names of the classes by label."""

    train: list[Labelled]
    validation: list[Labelled]
    classes: list[str]


def find_images(path: str, *, validation_fraction: float = 0.1, split_seed: int = 0) -> ImageSplits:
    """All images of a folder, in the order of their names.

    Args:
        path: The folder, as the configuration names it.
        validation_fraction: About this part goes to validation, where the folder has no split of its own.
        split_seed: Of that split.

    Raises:
        DataError: The folder has neither layout, or a split is empty.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        fix = "a folder that every slot can read, or data.path: null for handwritten digits"
        raise data_error(KEY, path, f"no such folder, seen from {os.getcwd()}.", fix)
    try:
        if (root / "meta").is_dir():
            found = _food101(root)
        else:
            found = _by_class(root, validation_fraction, split_seed)
    except (OSError, ValueError) as error:
        raise data_error(KEY, path, f"cannot be read as images: {error}.", LAYOUTS) from error
    if len(found.classes) < 2 or not found.train or not found.validation:
        there = f"{len(found.train)} images for training and {len(found.validation)} for validation"
        message = f"there are {there}, of the classes {', '.join(found.classes[:10]) or 'none'}."
        raise data_error(KEY, path, message, f"at least two classes, and an image of each split: {LAYOUTS}")
    return found


def _food101(root: Path) -> ImageSplits:
    classes, train, test = (
        [line.strip() for line in (root / f"meta/{name}.txt").read_text("utf-8").splitlines() if line.strip()]
        for name in ("classes", "train", "test")
    )
    labels = {name: label for label, name in enumerate(classes)}
    for line in train + test:
        if line.partition("/")[0] not in labels:
            raise ValueError(
                f"{line!r} in meta/train.txt or meta/test.txt is of no class in meta/classes.txt"
            )
    if both := sorted(set(train) & set(test)):
        raise ValueError(f"{both[0]} is in both meta/train.txt and meta/test.txt")
    sides = [
        [(str(root / "images" / f"{line}.jpg"), labels[line.partition("/")[0]]) for line in lines]
        for lines in (train, test)
    ]
    return ImageSplits(sides[0], sides[1], classes)


def _by_class(root: Path, validation_fraction: float, split_seed: int) -> ImageSplits:
    def folders(root: Path) -> list[str]:
        return sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))

    def images(root: Path) -> list[Labelled]:
        return [
            (str(file), label)
            for label, name in enumerate(classes)
            if (root / name).is_dir()
            for file in sorted((root / name).iterdir())
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
        ]

    train_root, separate = root, None  # a class may well be called "test", but not beside "train"
    if (root / "train").is_dir():
        train_root = root / "train"
        names = ("val", "valid", "validation", "test")
        separate = next((root / name for name in names if (root / name).is_dir()), None)
    classes = folders(train_root)
    train = images(train_root)
    if empty := set(range(len(classes))) - {label for _, label in train}:
        raise ValueError(f"{classes[min(empty)]} holds no image ({', '.join(sorted(SUFFIXES))})")
    if separate is not None:
        if strange := sorted(set(folders(separate)) - set(classes)):
            raise ValueError(f"{separate.name}/{strange[0]} is of a class that training does not have")
        return ImageSplits(train, images(separate), classes)
    files = [Path(file).relative_to(train_root).as_posix() for file, _ in train]
    return ImageSplits(*split(train, files, validation_fraction, seed=split_seed), classes)
