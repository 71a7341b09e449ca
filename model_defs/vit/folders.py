"""Folders of images -> which files, of which class, for training or for validation.

Two layouts: Food-101's own (``images/<class>/<id>.jpg``, and ``meta/`` with ``classes.txt``, ``train.txt`` and
``test.txt``), and a folder a class, either under ``train`` and one of ``val``, ``valid``, ``validation``, ``test``, or
right away.
No file is opened here but those of ``meta``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from determined_ds.errors import DataError, Problem
from model_defs.common.split import split

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
)
VALIDATION_FOLDERS = ("val", "valid", "validation", "test")
# Of more problems than this, those beyond are cut: one wrong folder makes every file a problem.
MAX_PROBLEMS = 10
LAYOUTS = (
    "a folder with Food-101's images/ and meta/; or with train/<class>/ and val/<class>/; or with <class>/"
)


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """One image of a class.

    Args:
        path: Where it is.
        label: Of its class, from 0.
    """

    path: str
    label: int


@dataclass(frozen=True, kw_only=True)
class ImageSplits:
    """The images of a folder.

    Args:
        train: For training.
        validation: For validation; none of them is in ``train``.
        classes: Their names, by label.
    """

    train: list[ImageFile]
    validation: list[ImageFile]
    classes: list[str]


@dataclass(frozen=True, kw_only=True)
class Finder:
    """Looks through a folder, and gathers what is wrong with it.

    Args:
        path: The folder, as the configuration names it.
        validation_fraction: About this part goes to validation, where the folder has no split of its own.
        split_seed: Of that split.
        problems: Found so far.
    """

    path: str
    validation_fraction: float = 0.1
    split_seed: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return Path(self.path).expanduser()

    def find(self) -> ImageSplits:
        """All images of the folder, in the order of their names.

        Raises:
            DataError: Everything that is wrong with it.
        """
        if not self.root.is_dir():
            fix = "a folder that every slot can read, or data.path: null for handwritten digits"
            self.refuse(f"no such folder, seen from {os.getcwd()}.", fix)
            raise DataError(self.problems)
        splits = self._food101() if (self.root / "meta").is_dir() else self._by_class()
        if not self.problems:
            self._check(splits)
        if self.problems:
            raise DataError(self.problems[:MAX_PROBLEMS])
        return splits

    def refuse(self, message: str, fix: str) -> None:
        self.problems.append(
            Problem(key="data.path", value=self.path, message=message, fix=fix, code="images")
        )

    def _check(self, splits: ImageSplits) -> None:
        if len(splits.classes) < 2:
            found = ", ".join(splits.classes) or "none"
            self.refuse(f"classification needs two classes; found: {found}.", LAYOUTS)
            return
        for name, images in (("training", splits.train), ("validation", splits.validation)):
            if not images:
                fix = "more images, or another data.validation_fraction"
                self.refuse(f"there is no image for {name}.", fix)

    # ----------------------------------------------------------------------------------------- Food-101

    def _food101(self) -> ImageSplits:
        classes = [line for _, line in self._lines("classes.txt")]
        if not classes and not self.problems:
            self.refuse("meta/classes.txt is empty.", "one class a line, as published")
        there = {name: _names_in(self.root / "images" / name) for name in classes}
        labels = {name: label for label, name in enumerate(classes)}
        train, validation = (
            self._listed(name, labels, there) if classes else {} for name in ("train.txt", "test.txt")
        )
        for name in sorted(train.keys() & validation.keys())[:MAX_PROBLEMS]:
            self.refuse(
                f"{name} is in both meta/train.txt and meta/test.txt: validation data would be trained on.",
                "take it out of one of them",
            )
        return ImageSplits(train=list(train.values()), validation=list(validation.values()), classes=classes)

    def _listed(
        self, listing: str, labels: dict[str, int], there: dict[str, set[str]]
    ) -> dict[str, ImageFile]:
        """The images that a file of ``meta`` lists, by the name that it gives them."""
        found: dict[str, ImageFile] = {}
        for number, line in self._lines(listing):
            if len(self.problems) >= MAX_PROBLEMS:
                break
            name, _, identity = line.partition("/")
            where = f"meta/{listing}:{number}"
            if not identity:
                self.refuse(
                    f"{where} is {line!r}, not <class>/<id>.", "one <class>/<id> a line, as published"
                )
            elif name not in labels:
                fix = "add the class to meta/classes.txt, or remove the line"
                self.refuse(f"{where} is of class {name!r}, which is not in meta/classes.txt.", fix)
            elif f"{identity}.jpg" not in there[name]:
                fix = "copy the image there, or remove the line"
                self.refuse(f"{where} names images/{line}.jpg, which is not there.", fix)
            else:
                path = str(self.root / "images" / f"{line}.jpg")
                found[line] = ImageFile(path=path, label=labels[name])
        return found

    def _lines(self, name: str) -> Iterator[tuple[int, str]]:
        """The lines of a file of ``meta`` that are not blank, numbered from 1."""
        try:
            content = (self.root / "meta" / name).read_bytes()
            lines = content.decode("utf-8").splitlines()
        except OSError as error:
            fix = "copy meta/ whole: classes.txt, train.txt and test.txt; without a meta/, a folder a class is taken"
            self.refuse(f"meta/{name} cannot be read: {error.strerror or error}.", fix)
            return
        except UnicodeDecodeError as error:
            message = f"meta/{name} is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}."
            self.refuse(message, f"convert it, e.g. iconv -f latin1 -t utf-8 {name}")
            return
        yield from ((number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip())

    # ------------------------------------------------------------------------------------ a folder a class

    def _by_class(self) -> ImageSplits:
        train_root = self.root / "train" if (self.root / "train").is_dir() else self.root
        validation_root = next(
            (self.root / name for name in VALIDATION_FOLDERS if (self.root / name).is_dir()), None
        )
        if train_root == self.root:
            validation_root = None  # a class may well be called "test"
        classes = _folders_in(train_root)
        labels = {name: label for label, name in enumerate(classes)}
        train = self._images(train_root, labels)
        if not train and not self.problems:
            self.refuse("there is no image in it.", LAYOUTS)
        if validation_root is not None:
            return ImageSplits(train=train, validation=self._images(validation_root, labels), classes=classes)
        names = [Path(image.path).relative_to(train_root).as_posix() for image in train]
        train, validation = split(train, names, self.validation_fraction, seed=self.split_seed)
        return ImageSplits(train=train, validation=validation, classes=classes)

    def _images(self, root: Path, labels: dict[str, int]) -> list[ImageFile]:
        images: list[ImageFile] = []
        for name in _folders_in(root):
            folder = root / name
            if name not in labels:
                fix = "train on the class too, or remove the folder"
                message = f"{folder.relative_to(self.root)} is of a class that training does not have."
                self.refuse(message, fix)
                continue
            files = sorted(file for file in _names_in(folder) if Path(file).suffix.lower() in SUFFIXES)
            if not files and labels:
                fix = f"put images in it ({', '.join(sorted(SUFFIXES))}), or remove the folder"
                self.refuse(f"{folder.relative_to(self.root)} holds no image.", fix)
            images += [ImageFile(path=str(folder / file), label=labels[name]) for file in files]
        return images


def _folders_in(root: Path) -> list[str]:
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _names_in(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if not entry.name.startswith(".")}
    except OSError:
        return set()  # each image listed in it is then missing
