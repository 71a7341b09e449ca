"""Folders of images -> which files, of which class, for training or for validation.

Two layouts: Food-101's own (``images/<class>/<id>.jpg``, and ``meta/`` with ``classes.txt``, ``train.txt`` and
``test.txt``), and a folder a class, either under ``train`` and one of ``val``, ``valid``, ``validation``, ``test``, or
right away.
No image is opened here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from model_defs.common.images import KEY, SUFFIXES
from model_defs.common.sections import data_error
from model_defs.common.split import split

VALIDATION_FOLDERS = ("val", "valid", "validation", "test")
LAYOUTS = (
    "a folder with Food-101's images/ and meta/; or with train/<class>/ and val/<class>/; or with <class>/"
)
Labelled = tuple[str, int]  # the path of an image, and its label


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """The images of a folder.

    Args:
        train: For training.
        validation: For validation; none of them is in ``train``.
        classes: Their names, by label.
    """

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
    if strange := [line for line in train + test if line.partition("/")[0] not in labels]:
        raise ValueError(
            f"{strange[0]!r} in meta/train.txt or meta/test.txt is of no class in meta/classes.txt"
        )
    if both := sorted(set(train) & set(test)):
        raise ValueError(f"{both[0]} is in both meta/train.txt and meta/test.txt")
    sides = [
        [(str(root / "images" / f"{line}.jpg"), labels[line.partition("/")[0]]) for line in lines]
        for lines in (train, test)
    ]
    return ImageSplits(train=sides[0], validation=sides[1], classes=classes)


def _by_class(root: Path, validation_fraction: float, split_seed: int) -> ImageSplits:
    train_root = root / "train" if (root / "train").is_dir() else root
    separate = [root / name for name in VALIDATION_FOLDERS if (root / name).is_dir()]
    if train_root == root:
        separate = []  # a class may well be called "test"
    classes = _folders(train_root)
    if separate and (strange := sorted(set(_folders(separate[0])) - set(classes))):
        raise ValueError(f"{separate[0].name}/{strange[0]} is of a class that training does not have")

    def images(folder: Path) -> list[Labelled]:
        return [
            (str(file), label)
            for label, name in enumerate(classes)
            if (folder / name).is_dir()
            for file in sorted((folder / name).iterdir())
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
        ]

    train = images(train_root)
    if empty := set(range(len(classes))) - {label for _, label in train}:
        raise ValueError(f"{classes[min(empty)]} holds no image ({', '.join(sorted(SUFFIXES))})")
    if separate:
        return ImageSplits(train=train, validation=images(separate[0]), classes=classes)
    names = [Path(file).relative_to(train_root).as_posix() for file, _ in train]
    train, validation = split(train, names, validation_fraction, seed=split_seed)
    return ImageSplits(train=train, validation=validation, classes=classes)


def _folders(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir() if each.is_dir() and not each.name.startswith("."))
