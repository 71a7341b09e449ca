"""Images for ViT: files, or handwritten digits -> tensors for training and for validation.

What a sample becomes is decided by the seed, the epoch and the sample alone: the same on every rank, with any number of
workers, and again on every resume.

Legend of shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers.utils.hub import cached_file

from determined_ds.errors import DataError, Problem
from model_defs.vit.augment import Augmentation, Pixels
from model_defs.vit.folders import MAX_PROBLEMS, Finder, ImageFile
from model_defs.vit.sections import flag, number, parse_section, text, whole
from model_defs.vit.splits import held_out

# Crops as torchvision and timm make them are for a hundred epochs and more; a fine-tuning is shorter.
PHOTOGRAPHS = Augmentation(crop_scale=0.3, horizontal_flip=True, color_jitter=0.2)
# A digit that is cut in half, or mirrored, is another one.
DIGITS = Augmentation(crop_scale=0.7, horizontal_flip=False, color_jitter=0.1)
# Of ViTImageProcessor: pixels from -1 to 1.
MEAN = STD = (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The ``data`` section of the experiment YAML."""

    path: str | None = None
    """Folder of images, as :mod:`model_defs.vit.folders` has it; None: scikit-learn's handwritten digits."""
    validation_fraction: float = 0.2
    """About this part of the images is for validation, where the folder has no split of its own."""
    split_seed: int = 0
    """Of that split; not the experiment's, so that experiments can be compared."""
    crop_scale: float | None = None
    """Least share of an image's area that a training crop keeps; None: 0.3, of digits 0.7; 1: no crops to speak of."""
    horizontal_flip: bool | None = None
    """Mirror every second training image; None: photographs, yes, and digits, no."""
    color_jitter: float | None = None
    """Brightness, contrast and saturation of training images vary by this part; None: 0.2, of digits 0.1."""
    num_workers: int = 0
    """Processes of each rank that read images; 0: the rank itself."""
    check_images: int = 100
    """This many images, evenly spread, are read before training; the others, when their turn comes."""


RULES = {
    "path": text(),
    "validation_fraction": number(0, 1, "a number between 0 and 1, both excluded"),
    "split_seed": whole(0),
    "crop_scale": number(0, 1.000001, "a number above 0, at most 1", optional=True),
    "horizontal_flip": flag(optional=True),
    "color_jitter": number(0, 1, "a number from 0 to below 1", optional=True, low_included=True),
    "num_workers": whole(0),
    "check_images": whole(0),
}


class Images(Protocol):
    """Labelled images."""

    def __len__(self) -> int: ...

    def label(self, index: int) -> int:
        """From 0."""
        ...

    def image(self, index: int) -> Image.Image:
        """In RGB.

        Raises:
            DataError: It cannot be read; the file is named.
        """
        ...


@dataclass(frozen=True)
class Files:
    """Images of files."""

    files: Sequence[ImageFile]

    def __len__(self) -> int:
        return len(self.files)

    def label(self, index: int) -> int:
        return self.files[index].label

    def image(self, index: int) -> Image.Image:
        path = self.files[index].path
        try:
            with Image.open(path) as opened:
                return opened.convert("RGB")
        except Exception as error:  # What PIL raises differs by the format, and by where it breaks off.
            raise DataError(_unreadable(path, error)) from error


def _unreadable(path: str, error: Exception) -> Problem:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return Problem(
        key="data.path",
        value=path,
        message=f"this image cannot be read: {reason}.",
        fix="copy it again, or remove it (and its line in meta/, where there is one)",
        code="unreadable-image",
    )


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, 8 x 8 pixels of 17 shades."""

    images_NHW: np.ndarray
    labels: Sequence[int]

    def __len__(self) -> int:
        return len(self.labels)

    def label(self, index: int) -> int:
        return self.labels[index]

    def image(self, index: int) -> Image.Image:
        shades = np.rint(self.images_NHW[index] * (255 / 16)).astype(np.uint8)
        return Image.fromarray(shades).convert("RGB")


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """``(pixels_CHW, label)`` of each image.

    An index beyond the number of images is one of a later epoch: image ``index % len`` in epoch ``index // len``,
    which is what :class:`EpochSampler` yields.

    Args:
        images: What there is.
        pixels: What becomes of it.
        seed: The run's.
    """

    def __init__(self, images: Images, pixels: Pixels, seed: int) -> None:
        self.images = images
        self.pixels = pixels
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        epoch, sample = divmod(index, len(self))
        generator = np.random.default_rng([self.seed, epoch, sample])
        return self.pixels(self.images.image(sample), generator), self.images.label(sample)


class EpochSampler(Sampler[int]):
    """All samples in another order each epoch, numbered on and on: sample ``i`` of epoch ``e`` is ``e * len + i``.

    So the dataset knows the epoch, in whatever process it is asked.

    Args:
        num_samples: Of an epoch.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that of ``epoch``; the loop says it, with torch's generator seeded for it."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        yield from (epoch * self.num_samples + torch.randperm(self.num_samples)).tolist()


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Images, found and yet to become tensors.

    Args:
        train: For training.
        validation: For validation.
        classes: Names of the classes, by label.
        augmentation: Of training images.
        num_workers: Processes that a loader is to have.
        description: What this is, for people.
    """

    train: Images
    validation: Images
    classes: list[str]
    augmentation: Augmentation
    num_workers: int
    description: str

    def datasets(
        self, *, image_size: int, seed: int, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD
    ) -> tuple[ImageDataset, ImageDataset]:
        """For training and for validation; see :class:`Pixels` and :class:`ImageDataset` for the arguments."""
        train, validation = (
            Pixels(image_size=image_size, mean=mean, std=std, augmentation=augmentation)
            for augmentation in (self.augmentation, None)
        )
        return ImageDataset(self.train, train, seed), ImageDataset(self.validation, validation, seed)


def load_images(data: Mapping[str, Any] | None) -> ImageData:
    """Find the images that the experiment's ``data`` section names.

    Args:
        data: Keys as in :class:`DataConfig`, all of them optional.

    Raises:
        ConfigError: Unknown keys or values of the wrong type in ``data``, all of them.
        DataError: The folder is not laid out as it should be, a split is empty, or an image cannot be read.
    """
    config = parse_section(DataConfig, data, RULES)
    if config.path is None:
        train, validation = _digits(config)
        classes, default, source = [str(digit) for digit in range(10)], DIGITS, "handwritten digits"
    else:
        finder = Finder(
            path=config.path,
            validation_fraction=config.validation_fraction,
            split_seed=config.split_seed,
        )
        found = finder.find()
        train, validation = Files(found.train), Files(found.validation)
        classes, default, source = found.classes, PHOTOGRAPHS, config.path
        _read_some(train, validation, config.check_images)
    return ImageData(
        train=train,
        validation=validation,
        classes=classes,
        augmentation=_augmentation(config, default),
        num_workers=config.num_workers,
        description=(
            f"{source}, {len(classes)} classes: {len(train):,} images for training, "
            f"{len(validation):,} for validation"
        ),
    )


def _augmentation(config: DataConfig, default: Augmentation) -> Augmentation:
    """What the section says, and the default where it says nothing."""
    scale, flip, jitter = config.crop_scale, config.horizontal_flip, config.color_jitter
    return Augmentation(
        crop_scale=default.crop_scale if scale is None else scale,
        horizontal_flip=default.horizontal_flip if flip is None else flip,
        color_jitter=default.color_jitter if jitter is None else jitter,
    )


def _digits(config: DataConfig) -> tuple[Images, Images]:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    sides: tuple[list[int], list[int]] = ([], [])
    for index in range(len(digits.target)):
        sides[held_out(f"digit {index}", config.validation_fraction, config.split_seed)].append(index)
    for side, name in zip(sides, ("training", "validation"), strict=True):
        if not side:
            key, value = "data.validation_fraction", config.validation_fraction
            message, fix = f"leaves no digit for {name}.", "validation_fraction: 0.2"
            raise DataError(Problem(key=key, value=value, message=message, fix=fix))
    train, validation = (
        Digits(digits.images[side], [int(label) for label in digits.target[side]]) for side in sides
    )
    return train, validation


def _read_some(train: Images, validation: Images, count: int) -> None:
    """Read images evenly spread over both splits, so that what is broken throughout is known before training."""
    total = len(train) + len(validation)
    count = min(count, total)
    problems: list[Problem] = []
    for place in range(count):
        index = place * total // count
        try:
            if index < len(train):
                train.image(index)
            else:
                validation.image(index - len(train))
        except DataError as error:
            problems += error.problems
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise DataError(problems)


def normalization(source: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel: a checkpoint's image processor's, or else ViT's own."""
    if source is None:
        return MEAN, STD
    try:
        file = cached_file(source, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
        processor = json.loads(Path(file).read_bytes()) if file else {}
    except (OSError, ValueError):
        processor = {}  # it is the weights that must be there; they say so themselves
    return tuple(processor.get("image_mean", MEAN)), tuple(processor.get("image_std", STD))
